"""Checks of the inputs that a run file names: data, weights, output, hardware, degrees.

``sppo train`` raises the problems found here, ``sppo config check`` lists them, and ``sppo eval``
makes the checks of an evaluation. No check depends on the size of memory, and none changes
anything. :func:`check_inputs` and :func:`check_evaluation` need no torch, whose import takes longer
than all of these checks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sppo.checkpoint.newest import NoCheckpointError, check_any
from sppo.config import RunConfig
from sppo.config.problems import Problem
from sppo.data.run_tokens import open_data, open_evaluated
from sppo.data.tokens import LOSS_MASK_FILE, TOKENS_FILE, TokenData
from sppo.hardware.file import hardware_for
from sppo.hardware.presets import PRESETS
from sppo.hardware.this_machine import find_gpus
from sppo.model.hf_files import check_headers
from sppo.offload.disk.disk_room import usable_directory
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees, multiplexed_problem, shard_heads, uses_msp
from sppo.quoting import quoted
from sppo.training.run_directory import check_output
from sppo.units import KIB

if TYPE_CHECKING:
    from sppo.data.sample_rows import TrainingData

_BLOCK_BYTES = 4 * KIB
_NUM_BLOCKS = 64
_SHOWN_DIGITS = 16
_UNBOUNDED_BYTES = 1 << 60
"""Memory of a test plan, so that it can fail only for reasons other than memory."""

_BAD_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors caused by a wrong path in a run file; other errors of the system are not caught."""


def check_inputs(run: RunConfig) -> None:
    """Raise ValueError if any input that the run names cannot be used.

    Raises:
        ValueError: Some inputs cannot be used; the message lists all problems, one per line.
    """
    problems = list(_input_problems(run))
    if problems:
        raise ValueError("\n".join(problem.rule for problem in problems))


def run_file_problems(run: RunConfig) -> list[Problem]:
    """Return the problems for which `sppo train` or `sppo eval` would fail with enough memory."""
    problems = list(_input_problems(run))
    if not problems:  # planning requires valid inputs
        activations = run.activations.policy
        problems = [
            *_problems("model.from_hf", run.model.from_hf, lambda: check_weights(run)),
            *_problems("activations", activations, lambda: _check_plan(run)),
        ]
    lines = ("; ".join(map(str.strip, problem.rule.splitlines())) for problem in problems)
    return [
        replace(problem, rule=line.replace(":; ", ": "))
        for problem, line in zip(problems, lines, strict=True)
    ]


def _input_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of each input that the run names."""
    for key, rule in degree_problems(run):
        yield Problem(f"parallel.{key}", quoted(getattr(run.parallel, key)), rule)
    data, hardware, disk = run.data, run.hardware, run.activations.disk
    machine = hardware if hardware == "auto" else hardware.file or hardware.preset
    yield from _problems("hardware", machine, lambda: hardware_for(hardware))
    yield from _problems("data.tokens", data.tokens, lambda: open_data(run, data.tokens))
    if data.eval_tokens is not None:
        yield from _problems("data.eval_tokens", data.eval_tokens, lambda: open_evaluated(run))
    yield from _problems("model.from_hf", run.model.from_hf, lambda: _check_headers(run))
    if disk is not None:
        yield from _problems("activations.disk", disk, lambda: usable_directory(Path(disk)))
    if run.train.tensorboard:
        yield from _problems("train.tensorboard", True, _check_tensorboard)
    yield from _problems("train.output", run.train.output, lambda: check_output(run))


def _problems(key: str, value: object, check: Callable[[], object]) -> Iterator[Problem]:
    """Yield the error of a check, if there is one, as a problem of a key with its value."""
    try:
        check()
    except (ValueError, *_BAD_PATHS) as error:
        where = getattr(error, "filename", None)
        text = f"{where}: {error.strerror}" if isinstance(error, OSError) and where else str(error)
        yield Problem(key, quoted(value), text)


def degree_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key of ``parallel``, rule) for each degree that does not divide the model or step."""
    parallel, model = run.parallel, run.model
    # With GPUs, a degree that is left out is chosen when training starts.
    decided = "pipeline_parallel_degree" not in run.parallel.open_degrees or find_gpus() is None
    if uses_msp(run) and decided:
        problem = multiplexed_problem(run, degrees=Degrees.of_run(run))
        if problem is not None:
            yield "multiplexed" if parallel.multiplexed == "on" else "schedule", problem
    if parallel.pipeline_parallel_degree > model.num_layers:
        yield (
            "pipeline_parallel_degree",
            f"parallel.pipeline_parallel_degree {parallel.pipeline_parallel_degree}: every stage "
            f"needs a layer, and the model has {model.num_layers}; use at most that many",
        )
    of_documents = run.data.samples == "documents"
    if not of_documents and run.train.sequences_per_step % parallel.data_parallel_degree:
        yield (
            "data_parallel_degree",
            f"parallel.data_parallel_degree {parallel.data_parallel_degree}: "
            f"train.sequences_per_step {run.train.sequences_per_step} cannot be divided evenly; "
            "make it a multiple",
        )
    try:
        shard_heads(run, degree=parallel.sequence_parallel_degree)
    except ValueError as error:
        yield "sequence_parallel_degree", str(error)


def _check_headers(run: RunConfig) -> None:
    """Check the headers of the weight files in ``model.from_hf``, if given, without torch."""
    if run.model.from_hf is not None:
        check_headers(Path(run.model.from_hf), run.model)


def check_weights(run: RunConfig) -> None:
    """Check headers and tied weights of ``model.from_hf``, if given; loads torch.

    Raises:
        ValueError: Tensors are missing or unknown, have wrong shapes, or the output projection
            differs from the embedding to which it is tied.
    """
    if run.model.from_hf is not None:
        from sppo.model.hf_reading import open_hf_weights

        open_hf_weights(Path(run.model.from_hf), run.model)


def _check_tensorboard() -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise ValueError(
            "train.tensorboard needs the tensorboard package: pip install 'sppo[track]', "
            "or set train.tensorboard=false"
        ) from None


def _check_plan(run: RunConfig) -> None:
    """Make a plan for a machine with unlimited memory; its errors apply to every machine."""
    from sppo.training.devices.device import count_devices, device_kind

    if run.parallel.open_degrees and count_devices(run) > 1:
        return  # the solver chooses degrees that are possible, when training starts
    machine = PRESETS["h100" if device_kind(run) == "cuda" else "laptop-cpu"]
    hardware = hardware_for(run.hardware, this_machine=machine)
    try:
        plan_run(
            run_of_longest_samples(run),
            hardware=hardware,
            available_bytes=_UNBOUNDED_BYTES,
            disk_bytes=_UNBOUNDED_BYTES,
            host_bytes=_UNBOUNDED_BYTES if hardware.device.kind == "cuda" else 0,
        )
    except MemoryError:  # for a tier whose size the run file limits
        return


def check_evaluation(run: RunConfig, *, checkpoint: Path | None, initial: bool) -> None:
    """Raise ValueError if inputs of an evaluation cannot be used, as far as torch is not needed.

    Args:
        run: Validated run configuration.
        checkpoint: Path of a checkpoint; None for the newest checkpoint of the run.
        initial: The initial weights of the run are evaluated instead of a checkpoint.

    Raises:
        ValueError: There is no checkpoint, or data, weights or hardware cannot be used.
    """
    if initial and checkpoint is not None:
        raise ValueError(
            f"--initial and --checkpoint {checkpoint}: leave one of the two out (in Python "
            "initial and checkpoint)"
        )
    if initial:
        _check_headers(run)
    elif checkpoint is not None:
        check_any(checkpoint)
    else:
        try:
            check_any(run.train.output)
        except NoCheckpointError as error:
            raise ValueError(
                f"train.output: {error}{'' if str(error).endswith('?') else '.'} To evaluate "
                f"{initial_weights(run)}, which the run starts from, write --initial (in Python "
                "initial=True)"
            ) from None
    open_evaluated(run)
    hardware_for(run.hardware)


def initial_weights(run: RunConfig) -> str:
    """Return the name of the initial weights of a run, for messages."""
    return run.model.from_hf or f"random weights of seed {run.train.seed}"


# Data on the ranks


def check_labels(training: TrainingData, *, steps: int) -> None:
    """Raise ValueError if no step has a valid label; stops at the first step that has one.

    Documents of a single token have none, so a stream of these alone is not walked through.
    """
    tokens = training.data
    if tokens.loss_mask is None and not training.isolate_documents:
        return
    consumed, are_single = 0, tokens.num_documents >= tokens.num_tokens
    for samples in islice(training.steps(), 0 if are_single else steps):
        if training.has_labels(consumed):
            return
        consumed += len(samples)
        if consumed >= training.num_samples:  # further epochs have the same samples
            break
    fix = (
        "Prepare the data again, with a loss mask that is true for what is to be learnt"
        if tokens.loss_mask is not None
        else "Set data.isolate_documents=false, or prepare longer documents"
    )
    raise ValueError(
        f"{training.why_no_labels(0)}, and so it is in every step: there is nothing to learn "
        f"from. {fix}"
    )


def input_facts(run: RunConfig, data: TokenData) -> dict[str, str]:
    """Return the facts about a rank's inputs that all ranks compare, by name."""
    meta, tokenizer = data.meta, data.meta.tokenizer
    documents = hashlib.sha256(data.document_offsets.data)
    facts = {
        "data.tokens, tokens": f"{meta.num_tokens} {meta.dtype}",
        "data.tokens, tokens_sha256": meta.tokens_sha256[:_SHOWN_DIGITS],
        "data.tokens, sample of tokens.bin": fingerprint(data.directory / TOKENS_FILE),
        "data.tokens, documents": str(meta.num_documents),
        "data.tokens, starts of documents": documents.hexdigest()[:_SHOWN_DIGITS],
        "data.tokens, vocabulary": str(meta.vocab_size),
        "data.tokens, tokenizer": str(tokenizer.sha256 and tokenizer.sha256[:_SHOWN_DIGITS]),
        "data.tokens, end of document": str(tokenizer.end_of_document),
    }
    if meta.loss_mask_sha256 is not None:
        facts |= {
            "data.tokens, loss_mask_sha256": meta.loss_mask_sha256[:_SHOWN_DIGITS],
            "data.tokens, sample of loss_mask.bin": fingerprint(data.directory / LOSS_MASK_FILE),
        }
    if run.model.from_hf is not None:
        facts |= {
            f"model.from_hf, sample of {file.name}": fingerprint(file)
            for file in sorted(Path(run.model.from_hf).glob("*.safetensors"))
        }
    return facts


def fingerprint(path: Path) -> str:
    """Return a checksum of a file's size and of 64 blocks of 4 KiB spread evenly over it.

    Distinguishes different files of any size, but may miss a few flipped bytes.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for index in range(_NUM_BLOCKS):
            start = max(0, size - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, start))
    return digest.hexdigest()[:_SHOWN_DIGITS]
