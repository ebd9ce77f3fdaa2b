"""Checks of what a run file names, before anything starts: data, weights, output, machine, degrees.

``sppo train`` refuses what is found here, and ``sppo config check`` lists it. Nothing here depends
on how much memory there is, nothing is changed, and :func:`check_inputs` needs no torch, whose
import takes longer than all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sppo.config import RunConfig
from sppo.config.problems import Problem
from sppo.data.run_tokens import open_data, open_evaluated
from sppo.hardware.file import hardware_for
from sppo.hardware.presets import PRESETS
from sppo.model.hf_files import check_headers
from sppo.offload.disk import usable_directory
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees, multiplexed_problem, shard_heads, shares_units
from sppo.quoting import quoted
from sppo.training.run_directory import check_output

_UNBOUNDED_BYTES = 1 << 60
"""Memory with which a plan is made to see what it refuses for other reasons."""

_BAD_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of a wrong path in a run file; other faults of the system end the command as such."""


@dataclass(frozen=True, slots=True)
class _Check:
    """One thing that a run file names."""

    key: str
    value: Callable[[RunConfig], object]
    check: Callable[[RunConfig], object]
    """Raises ValueError or OSError."""


def check_inputs(run: RunConfig) -> None:
    """Look at everything that the run names.

    Raises:
        ValueError: all problems, one after another.
    """
    problems = list(_input_problems(run))
    if problems:
        raise ValueError("\n".join(problem.rule for problem in problems))


def run_file_problems(run: RunConfig) -> list[Problem]:
    """Return what `sppo train` and `sppo eval` would refuse on a machine with enough memory."""
    problems = [*_input_problems(run), *_problems(run, _HELD_OUT)]
    if not problems:  # a plan is made of what was found whole
        problems = [*_problems(run, _WEIGHTS), *_problems(run, _PLAN)]
    return [replace(problem, rule=_on_one_line(problem.rule)) for problem in problems]


def _on_one_line(rule: str) -> str:
    """Return the lines of ``rule`` as parts of one sentence."""
    return "; ".join(line.strip() for line in rule.splitlines()).replace(":; ", ": ")


def _input_problems(run: RunConfig) -> Iterator[Problem]:
    parallel = run.parallel
    for key, rule in degree_problems(run):
        yield Problem(f"parallel.{key}", quoted(getattr(parallel, key)), rule)
    for check in _INPUTS:
        yield from _problems(run, check)


def _problems(run: RunConfig, check: _Check) -> Iterator[Problem]:
    try:
        check.check(run)
    except (ValueError, *_BAD_PATHS) as error:
        where = getattr(error, "filename", None)
        text = f"{where}: {error.strerror}" if isinstance(error, OSError) and where else str(error)
        yield Problem(check.key, quoted(check.value(run)), text)


def degree_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key of ``parallel``, rule) for degrees that model or step cannot be divided by."""
    parallel, model = run.parallel, run.model
    if shares_units(run):
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


def _named_hardware(run: RunConfig) -> object:
    config = run.hardware
    return config if config == "auto" else config.file or config.preset


def check_stored_weights(run: RunConfig) -> None:
    """Check the headers of ``model.from_hf``, if given.

    Raises:
        ValueError: missing or unknown tensors, or wrong shapes.
    """
    if run.model.from_hf is not None:
        check_headers(Path(run.model.from_hf), run.model)


def check_weights(run: RunConfig) -> None:
    """Check ``model.from_hf``, if given, with what its headers do not say; loads torch.

    Raises:
        ValueError: missing or unknown tensors, wrong shapes, or a projection that is not the
            embedding it is tied to.
    """
    if run.model.from_hf is not None:
        from sppo.model.hf import open_hf_weights

        open_hf_weights(Path(run.model.from_hf), run.model)


def _check_held_out(run: RunConfig) -> None:
    if run.data.eval_tokens is not None:
        open_evaluated(run)


def _check_disk(run: RunConfig) -> None:
    if run.activations.disk is not None:
        usable_directory(Path(run.activations.disk))


def _check_tensorboard(run: RunConfig) -> None:
    if not run.train.tensorboard:
        return
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise ValueError(
            "train.tensorboard needs the tensorboard package: pip install 'sppo[track]', "
            "or set train.tensorboard=false"
        ) from None


def _check_plan(run: RunConfig) -> None:
    """Make the plan of a machine without limits: what it refuses, it refuses on any."""
    from sppo.training.devices.choose_device import device_kind

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
    except MemoryError:  # of a tier that the run file limits
        return


_INPUTS = (
    _Check("hardware", _named_hardware, lambda run: hardware_for(run.hardware)),
    _Check("data.tokens", lambda run: run.data.tokens, lambda run: open_data(run, run.data.tokens)),
    _Check("model.from_hf", lambda run: run.model.from_hf, check_stored_weights),
    _Check("activations.disk", lambda run: run.activations.disk, _check_disk),
    _Check("train.tensorboard", lambda run: run.train.tensorboard, _check_tensorboard),
    _Check("train.output", lambda run: run.train.output, check_output),
)
_HELD_OUT = _Check("data.eval_tokens", lambda run: run.data.eval_tokens, _check_held_out)
_WEIGHTS = _Check("model.from_hf", lambda run: run.model.from_hf, check_weights)
_PLAN = _Check("activations", lambda run: run.activations.policy, _check_plan)
