"""Sink that writes the metrics of every step to TensorBoard event files."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

from sppo.output_file import named_errors
from sppo.report.metrics import StepMetrics

_logger = logging.getLogger(__name__)
_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "skipped": "train/skipped",
    "step_s": "speed/step_s",
    "predicted_step_s": "speed/predicted_step_s",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "exposed_copy_s": "speed/exposed_copy_s",
    "copy_out_bytes_per_s": "speed/copy_out_bytes_per_s",
    "copy_back_bytes_per_s": "speed/copy_back_bytes_per_s",
    "device_peak_bytes": "memory/device_peak_bytes",
    "host_peak_bytes": "memory/host_peak_bytes",
    "offloaded_bytes": "memory/offloaded_bytes",
}


class TensorBoardSink:
    """Sink that writes metrics as scalars to event files, by a thread of TensorBoard.

    Args:
        directory: Directory of the event files, created if needed.
        resume_step: Number of steps done before; TensorBoard hides earlier records of later steps.

    Raises:
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: Path, *, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        with named_errors(directory):
            self._writer = SummaryWriter(str(directory), purge_step=resume_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step as scalars; unknown ones are left out."""
        values = asdict(metrics)
        with named_errors(self._directory):
            for field, tag in _TAGS.items():
                if values[field] is not None:
                    self._writer.add_scalar(tag, float(values[field]), metrics.step)

    def close(self) -> None:
        """Close the event file."""
        try:
            self._writer.close()
        except OSError as error:  # the run is over, and its state saved
            _logger.warning("%s is incomplete: %s", self._directory, error.strerror)
