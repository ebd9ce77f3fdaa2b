"""Checkpoints of a run: all ranks load, check and save the training state together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import CheckpointManager, run_metadata
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.checkpoint.state_block import StateBlock
from sppo.data.tokens import TokenData
from sppo.training.job import Job
from sppo.training.run_directory import require_output
from sppo.training.state import TrainingState
from sppo.training.step import first_of, is_finite, nonfinite_names

_log = logging.getLogger(__name__)

CHECKPOINT_TIMEOUT_FACTOR = 10
"""Factor on ``parallel.timeout_s`` for waits for other ranks that read or write a checkpoint."""


class RunCheckpoints:
    """Checkpoints of one run."""

    def __init__(self, job: Job, state: TrainingState, *, output: Path, tokens: TokenData) -> None:
        run = job.run
        self._run, self._peers, self._state = run, job.peers, state
        self._output, self._tokens = output, tokens
        self._manager = CheckpointManager(
            output / CHECKPOINTS_DIRECTORY,
            keep=run.checkpoint.keep,
            async_save=run.checkpoint.async_save,
            group=job.mesh.groups.world,
            timeout_s=CHECKPOINT_TIMEOUT_FACTOR * run.parallel.timeout_s,
        )

    def resume(self) -> tuple[int, Mapping[str, Any]]:
        """Load the newest valid checkpoint into the state.

        Returns:
            Number of steps done, and the metadata of the checkpoint; (0, {}) if there is none.

        Raises:
            ValueError: The token data is not what the run began with, or the state of a rank has
                NaN or infinite values.
        """
        state, tokens = self._state, self._tokens
        checkpoint, live = self._manager.latest_valid(), state.optimizer.state()
        step, metadata = 0, {}
        if checkpoint is not None:
            step, metadata = checkpoint.step, checkpoint.metadata
            if metadata.get("tokens_sha256") not in (None, tokens.meta.tokens_sha256):
                raise ValueError(
                    f"{tokens.directory} holds other tokens than the run began with "
                    f"({checkpoint.path}); prepare the old ones again, or choose another "
                    "train.output"
                )
            self._manager.load_into(checkpoint, state.sharded.blocks(live))
            state.optimizer.load_state(live)
            state.sharded.gather(state.weights)
            if step < self._run.train.steps:
                _log.info("going on after step %d from %s", step, checkpoint.path)
        found = self._peers.all_gather(nonfinite_place(state.sharded.blocks(live)))
        if bad := [place for place in found if place is not None]:
            where = self._run.model.from_hf or self._run.train.output
            raise ValueError(
                f"{where}: {bad[0]}; training would keep it, and no checkpoint with NaN or "
                "infinity is saved: repair the weights"
            )
        state.drop_pages()
        return step, metadata

    def save(self, step: int, *, sequences_consumed: int, more: Mapping[str, Any]) -> str | None:
        """Save a checkpoint; if the state has NaN or inf, return why it was not saved, else None.

        Args:
            step: Number of steps done.
            sequences_consumed: Number of sequences, or samples, that these steps consumed.
            more: Further metadata that the next steps need to resume.
        """
        self._peers.decided_by_main(lambda: require_output(self._output))
        state = self._state.optimizer.state()
        told = self._peers.all_gather(nonfinite_state(state))
        problems = [problem for problem in told if problem is not None]
        if problems:
            return f"the state after step {step} is not saved; {problems[0]}"
        metadata = run_metadata(
            self._run,
            sequences_consumed=sequences_consumed,
            tokens_sha256=self._tokens.meta.tokens_sha256,
            more=more,
        )
        self._manager.save(self._state.sharded.saved(state), step=step, metadata=metadata)
        self._state.drop_pages()
        return None

    def wait(self) -> None:
        """Wait until the last checkpoint is written to the disk."""
        self._manager.wait()

    def are_missing(self) -> bool:
        """Return whether the run has no checkpoint yet. Collective."""
        directory = self._manager.directory
        return self._peers.decided_by_main(lambda: not list_checkpoints(directory))


def nonfinite_state(state: Mapping[str, Tensor]) -> str | None:
    """Return the names of tensors with NaN or infinity, as a message; None if all are finite."""
    bad = nonfinite_names(state)
    return f"not finite: {first_of(bad)}" if bad else None


def nonfinite_place(state: Mapping[str, StateBlock]) -> str | None:
    """Return tensor and row of the first NaN or infinite value; None if all are finite."""
    for name, block in state.items():
        if block.tensor.numel() and not is_finite(block.tensor):
            bad = ~torch.isfinite(block.tensor)
            rows = bad.reshape(bad.shape[0], -1).any(1) if bad.dim() else bad.reshape(1)
            first = int(rows.nonzero()[0]) + (block.offsets[0] if block.offsets else 0)
            more = f" and {int(rows.sum()) - 1} more" if rows.sum() > 1 else ""
            return f"{name} is not finite in row {first}{more} of {(*block.global_shape, 1)[0]}"
    return None
