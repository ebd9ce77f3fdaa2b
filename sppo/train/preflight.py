"""Everything that can be found wrong before a run starts, and what it will do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sppo.config import RunConfig
from sppo.kernels.machine_memory import memory_room
from sppo.planning.resolve import Resolved, resolve
from sppo.train.data import TrainingData
from sppo.train.run_directory import check_output
from sppo.train.tokens import TokenData, check_fits, open_tokens
from sppo.units import format_bytes


@dataclass(frozen=True, slots=True)
class Preflight:
    """A run whose inputs are known to fit together."""

    data: TrainingData
    resolved: Resolved


def check_before_training(run: RunConfig) -> Preflight:
    """Open the data, check weights and output, decide what was left to ``auto``.

    Raises:
        ValueError: what is wrong, with the rule and the fix; nothing was changed.
        MemoryError: the run does not fit in this machine's memory.
    """
    data = open_data(run, run.data.tokens)
    check_weights(run)
    check_output(run)
    if run.train.tensorboard:
        _check_tensorboard()
    training = TrainingData(
        data,
        length=run.sequence.length,
        sequences_per_step=run.train.sequences_per_step,
        seed=run.train.seed,
        shuffle=run.data.shuffle,
        isolate_documents=run.data.isolate_documents,
    )
    available = memory_room().least_bytes
    resolved = resolve(run, available_bytes=available)
    _check_memory(resolved, available)
    return Preflight(training, resolved)


def open_data(run: RunConfig, directory: str) -> TokenData:
    """Tokens that this run's model and sequence length can use.

    Raises:
        ValueError: missing, damaged, ids beyond the vocabulary, or shorter than a sequence.
    """
    data = open_tokens(Path(directory))
    check_fits(data, vocab_size=run.model.vocab_size, length=run.sequence.length)
    return data


def check_weights(run: RunConfig) -> None:
    """Read the headers of ``model.from_hf``, if given.

    Raises:
        ValueError: missing or unknown tensors, or wrong shapes.
    """
    if run.model.from_hf is not None:
        from sppo.model.hf import open_hf_weights

        open_hf_weights(Path(run.model.from_hf), run.model)


def _check_memory(resolved: Resolved, available: int) -> None:
    """A policy that was asked for is taken as long as it can work at all."""
    needed = resolved.memory.total_bytes
    if needed > available:
        raise MemoryError(
            f"activations.policy={resolved.policy} needs {format_bytes(needed)} for a sequence of "
            f"{resolved.boundaries[-1]} tokens, and {format_bytes(available)} are available; write "
            "activations.policy=auto, shorten sequence.length or take a smaller model"
        )


def _check_tensorboard() -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise ValueError(
            "train.tensorboard needs the tensorboard package: pip install 'sppo[track]', "
            "or set train.tensorboard=false"
        ) from None
