"""Checkpoints of a run: the newest is loaded, further ones are saved when they are due."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX, CheckpointManager
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints, run_metadata
from sppo.checkpoint.newest import Checkpoint
from sppo.data.tokens import TokenData
from sppo.hardware.faults import mean_time_between_stops_s, saving_interval_s
from sppo.training.job import Job
from sppo.training.run_directory import require_output
from sppo.training.starting_checkpoint import provenance
from sppo.training.state import TrainingState
from sppo.training.watch.nonfinite import first_of, nonfinite_names
from sppo.training.weights.adapter_export import adapter_export
from sppo.training.weights.base_weights import base_of
from sppo.training.weights.choice_biases import choice_bias_blocks

_log = logging.getLogger(__name__)

SAVE_FILE = "save"
"""File in the output directory that asks a run to save after its current step."""
_COMPARED = {
    "tokens_sha256": "tokens",
    "documents_sha256": "documents",
    "loss_mask_sha256": "tokens that count in the loss",
}
"""Checksums of token data that a resumed run compares, and what they are of."""
_TIMEOUT_FACTOR = 10
"""Factor on ``parallel.timeout_s`` for waits for other ranks that read or write a checkpoint."""


class RunCheckpoints:
    """Checkpoints of one run. Collective.

    Args:
        job: Job that trains the run.
        state: State that is saved, with the weights that the run starts from.
        output: Output directory of the run.
        sources: Token data of the run.
        start: Checkpoint of another run, from which `state` has weights: those that the run starts
            from, or, if it goes on, those that it has frozen.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        *,
        output: Path,
        sources: Sequence[TokenData],
        start: Checkpoint | None = None,
    ) -> None:
        run = job.run
        self._run, self._peers, self._state = run, job.peers, state
        self._output, self._sources, self._from = output, sources, start
        self._base, export = job.peers.decided_by_main(
            lambda: (base_of(run, start), adapter_export(run, start))
        )
        """Name and digest of the weights that checkpoints leave out; None if they hold all."""
        self._manager = CheckpointManager(
            output / CHECKPOINTS_DIRECTORY,
            keep=run.checkpoint.keep,
            async_save=run.checkpoint.async_save,
            group=job.mesh.groups.world,
            timeout_s=_TIMEOUT_FACTOR * run.parallel.timeout_s,
            export=export,
        )
        self._saved_step, self._saved_at = 0, time.monotonic()
        """Steps of the newest checkpoint, and the time of its save."""
        self._saving_s: float | None = None
        """Seconds of the newest save, or of loading a checkpoint; None before both."""
        self._between_stops_s = mean_time_between_stops_s(
            run.hardware, num_devices=job.mesh.shape.num_ranks
        )
        self._start: Mapping[str, Any] | None = None
        """Provenance of the checkpoint of another run that this run started from."""

    def resume(self) -> tuple[int, Mapping[str, Any]]:
        """Load the newest valid checkpoint into the state, or else what the run starts from.

        Returns:
            Number of steps done, and the metadata of the checkpoint; 0, and of metadata only the
            position in the data, if there is none.

        Raises:
            ValueError: The token data is not what the run began with, or the state of a rank has
                NaN or infinite values.
        """
        state, run = self._state, self._run
        checkpoint, live = self._manager.latest_valid(), state.optimizer.state()
        step, metadata = 0, {}
        if checkpoint is None and self._from is not None:
            metadata = self._begin_from(self._from, live)
        elif checkpoint is not None:
            step, metadata = checkpoint.step, checkpoint.metadata
            self._start = metadata.get("start")
            self._check_tokens(checkpoint)
            biases = choice_bias_blocks(state.choice_biases)
            began = time.monotonic()
            self._manager.load_into(checkpoint, {**state.sharded.blocks(live), **biases})
            self._saving_s = time.monotonic() - began  # as many bytes as a save, until the first
            state.optimizer.load_state(live)
            state.sharded.gather(state.weights)
            if step < run.train.steps:
                _log.info("going on after step %d from %s", step, checkpoint.path)
        used = {**state.sharded.frozen(state.weights), **live}
        if bad := next(filter(None, self._peers.all_gather(nonfinite_names(used))), None):
            where = run.hf_weights or run.train.output
            raise ValueError(
                f"{where}: not finite: {first_of(bad)}; training would keep it, and no checkpoint "
                "with NaN or infinity is saved: repair the weights"
            )
        state.drop_pages()
        self._saved_step, self._saved_at = step, time.monotonic()
        return step, metadata

    def _begin_from(self, start: Checkpoint, live: Mapping[str, Tensor]) -> dict[str, Any]:
        """Load the optimizer's state of another run's checkpoint, if the run takes it along.

        Args:
            start: Checkpoint of the other run.
            live: State of this rank's optimizer, filled in place.

        Returns:
            Metadata of the checkpoint that the run takes along: its position in the data, or {}.
        """
        taken = self._run.start
        assert taken is not None, "the run names the other run"
        self._start = self._peers.decided_by_main(lambda: provenance(start))
        also = " with its optimizer" * taken.optimizer + " at its position in the data" * taken.data
        _log.info("starting from %s%s", start.path, also)
        if taken.optimizer:
            moments = {k: t for k, t in live.items() if not k.startswith(MODEL_PREFIX)}
            self._manager.load_into(start, self._state.sharded.blocks(moments))
            self._state.optimizer.load_state(live)
        if not taken.data:
            return {}
        self._check_tokens(start)
        return {"sequences_consumed": start.metadata["sequences_consumed"]}

    def _check_tokens(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError unless a checkpoint's position is one in the data of this run."""
        for name, what in _COMPARED.items():
            if checkpoint.metadata.get(name) not in (None, self._checksums[name]):
                raise ValueError(
                    f"{', '.join(str(source.directory) for source in self._sources)}: other {what} "
                    f"than those that {checkpoint.path} was trained on; prepare these again, or "
                    "begin with another train.output, without start.data"
                )

    @property
    def _checksums(self) -> dict[str, str]:
        """Checksums of the token data of all sources, in their order, by name."""
        metas = [source.meta for source in self._sources]
        return {name: " ".join(str(getattr(meta, name)) for meta in metas) for name in _COMPARED}

    def is_due_by_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after a number of steps."""
        every = self._run.checkpoint.every
        return every != "auto" and every > 0 and step % every == 0

    def is_due_by_time(self, step: int) -> bool:
        """Return whether an automatic checkpoint is due by the clock of this rank."""
        if self._run.checkpoint.every != "auto" or step == self._saved_step:
            return False
        waited_s = time.monotonic() - self._saved_at
        return waited_s >= saving_interval_s(self._saving_s, between_stops_s=self._between_stops_s)

    def is_asked_for(self, step: int) -> bool:
        """Return whether this rank finds the file that asks for a checkpoint."""
        return step != self._saved_step and (self._output / SAVE_FILE).is_file()

    def take_request(self) -> bool:
        """Remove the file that asks for a checkpoint; return whether rank 0 removed it here."""
        request = self._output / SAVE_FILE
        if self._peers.rank != 0 or not request.is_file():
            return False
        request.unlink(missing_ok=True)
        return True

    def save(
        self,
        step: int,
        *,
        sequences_consumed: int,
        more: Mapping[str, Any],
        is_best: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Save a checkpoint; if the state has NaN or inf, return why it was not saved, else None.

        Args:
            step: Number of steps done.
            sequences_consumed: Number of sequences, or samples, that these steps consumed.
            more: Further metadata that the next steps need to resume.
            is_best: Whether this is the best checkpoint so far, which is kept.
            check: As of :meth:`CheckpointManager.save`.
        """
        self._peers.decided_by_main(lambda: require_output(self._output))
        began, state = time.monotonic(), self._state.optimizer.state()
        told = self._peers.all_gather(nonfinite_names(state))
        self._saved_step, self._saved_at = step, began
        if bad := next(filter(None, told), None):
            return f"the state after step {step} is not saved; not finite: {first_of(bad)}"
        metadata = run_metadata(
            self._run,
            sequences_consumed=sequences_consumed,
            more={
                **more,
                **self._checksums,
                **({} if self._start is None else {"start": self._start}),
                **({} if self._base is None else {"base": self._base}),
            },
        )
        biases = choice_bias_blocks(self._state.choice_biases)
        saved = {**self._state.sharded.saved(state), **biases}
        self._manager.save(saved, step=step, metadata=metadata, is_best=is_best, check=check)
        self._state.drop_pages()
        self._saved_at = time.monotonic()
        self._saving_s = self._saved_at - began
        return None

    def wait(self) -> None:
        """Wait until the last checkpoint is written to the disk."""
        self._manager.wait()

    def are_missing(self) -> bool:
        """Return whether the run has no checkpoint yet. Collective."""
        directory = self._manager.directory
        return self._peers.decided_by_main(lambda: not list_checkpoints(directory))
