"""Checks of the inputs that a run file names: before a run, without a run, for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from sppo.checkpoint.newest import NoCheckpointError, check_any
from sppo.config import RunConfig
from sppo.config.problems import Problem
from sppo.cost.parameter_groups import check_groups
from sppo.cost.trainable import trainable_of_run, trainable_problems
from sppo.data.evaluated_sets import open_set, set_key
from sppo.data.mixture import check_mixture
from sppo.data.run_tokens import open_data, open_evaluated
from sppo.data.samples.epochs import with_steps
from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for
from sppo.hardware.this_machine import find_gpus
from sppo.model.huggingface.files import check_headers
from sppo.model.huggingface.peft_format import check_adapter
from sppo.offload.disk.disk_room import usable_directory
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.run_plan import plan_without_limits
from sppo.planning.search.choices import Degrees, degree_problems
from sppo.quoting import quoted
from sppo.report.tracking.trackers import check_package
from sppo.training.run_directory import check_output
from sppo.training.starting_checkpoint import check_start, check_start_vocabulary

_TENSORBOARD = "train.tensorboard"
_BAD_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors caused by a wrong path in a run file; other errors of the system are not caught."""


def check_inputs(run: RunConfig) -> None:
    """Raise ValueError if any input that the run names cannot be used.

    Raises:
        ValueError: Some inputs cannot be used; the message lists all problems, one per line.
    """
    problems = list(input_problems(run))
    if problems:
        raise ValueError("\n".join(problem.rule for problem in problems))


def input_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of each input that the run names."""
    yield from _degree_problems(run)
    data, hardware, disk, weights = run.data, run.hardware, run.activations.disk, run.hf_weights
    machine = hardware if hardware == "auto" else hardware.file or hardware.preset
    yield from problems_of_check("hardware", machine, lambda: hardware_for(hardware))
    yield from _data_problems(run)
    if data.eval_tokens not in (None, data.tokens):
        yield from problems_of_check(
            "data.eval_tokens", data.eval_tokens, lambda: open_evaluated(run)
        )
    for name, own in run.evaluated_sets.items():
        yield from problems_of_check(set_key(name), own.tokens, partial(open_set, run, name))
    if weights is not None:
        files = Path(weights)
        yield from problems_of_check(
            "model.from_hf", weights, lambda: check_headers(files, run.model)
        )
    yield from _trainable_problems(run)
    if run.adapter is not None and run.adapter.from_peft is not None:
        adapter, directory = run.adapter, run.adapter.from_peft
        yield from problems_of_check(
            "adapter.from_peft",
            directory,
            lambda: check_adapter(Path(directory), run.model, adapter),
        )
    if run.start is not None:
        yield from problems_of_check("start", run.start.from_run, lambda: check_start(run))
    if disk is not None:
        yield from problems_of_check("activations.disk", disk, lambda: usable_directory(Path(disk)))
    for tracker in run.trackers:
        key, value = ("track.to", tracker) if tracker in run.track.to else (_TENSORBOARD, True)
        yield from problems_of_check(key, value, partial(check_package, tracker))
    yield from problems_of_check("train.output", run.train.output, lambda: check_output(run))


def _trainable_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the keys that name parameters."""
    found = [
        Problem(key, quoted(attrgetter(key)(run)), rule) for key, rule in trainable_problems(run)
    ]
    yield from found
    if found:
        return
    trainable = trainable_of_run(run)
    trained = trainable.trained_shapes(run.model)
    frozen = trainable.parameter_shapes(run.model).keys() - trained
    globs = ", ".join(group.match for group in run.optimizer.groups)
    yield from problems_of_check(
        "optimizer.groups", globs, lambda: check_groups(trained, run.optimizer, frozen=frozen)
    )


def _data_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of each source of training tokens; then, without any, of their mixture."""
    found: list[Problem] = []
    for key, directory in run.data.directories.items():
        found += problems_of_check(key, directory, partial(open_data, run, directory))
    if not found and run.data.sources is not None:
        found += problems_of_check(
            "data.sources", list(run.data.sources), lambda: check_mixture(run)
        )
    if not found and run.start is not None:
        found += problems_of_check(
            "start.from_run", run.start.from_run, lambda: check_start_vocabulary(run)
        )
    yield from found


def problems_of_check(key: str, value: object, check: Callable[[], object]) -> Iterator[Problem]:
    """Yield the error of a check, if there is one, as a problem of a key with its value."""
    try:
        check()
    except (ValueError, *_BAD_PATHS) as error:
        where = getattr(error, "filename", None)
        text = f"{where}: {error.strerror}" if isinstance(error, OSError) and where else str(error)
        yield Problem(key, quoted(value), text)


def _degree_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the run's degrees; those of MSP once the pipeline degree is known."""
    # With GPUs, a degree that is left out is chosen when training starts.
    decided = "pipeline_parallel_degree" not in run.parallel.open_degrees or find_gpus() is None
    for key, rule in degree_problems(run, degrees=Degrees.of_run(run)):
        if decided or key not in ("multiplexed", "schedule"):
            yield Problem(f"parallel.{key}", quoted(getattr(run.parallel, key)), rule)


# Without a run


def run_file_problems(run: RunConfig) -> list[Problem]:
    """Return the problems for which `sppo train` or `sppo eval` would fail with enough memory."""
    problems = list(input_problems(run))
    if not problems:  # planning requires valid inputs
        from sppo.training.weights.starting_weights import check_weights

        activations = run.activations.policy
        problems = [
            *problems_of_check("model.from_hf", run.hf_weights, lambda: check_weights(run)),
            *problems_of_check("train.epochs", run.train.epochs, lambda: with_steps(run)),
            *problems_of_check("activations", activations, lambda: _check_plan(run)),
        ]
    lines = ("; ".join(map(str.strip, problem.rule.splitlines())) for problem in problems)
    return [
        replace(problem, rule=line.replace(":; ", ": "))
        for problem, line in zip(problems, lines, strict=True)
    ]


def _check_plan(run: RunConfig) -> None:
    """Make a plan for a machine with unlimited memory; its errors apply to every machine."""
    from sppo.training.devices.device import count_devices, device_kind

    if run.parallel.open_degrees and count_devices(run) > 1:
        return  # the solver chooses degrees that are possible, when training starts
    machine = PRESETS["h100" if device_kind(run) == "cuda" else "laptop-cpu"]
    hardware = hardware_for(run.hardware, this_machine=machine)
    try:
        plan_without_limits(run_of_longest_samples(run), hardware=hardware)
    except MemoryError:  # for a tier whose size the run file limits
        return


# For an evaluation


@dataclass(frozen=True, slots=True)
class EvaluatedWeights:
    """Weights of a run that are asked for: by default those of its newest checkpoint."""

    checkpoint: Path | None = None
    """Path of a checkpoint of it."""
    initial: bool = False
    """True for those that the run starts from, ``model.from_hf`` or random ones."""

    def source(self, run: RunConfig) -> Path | None:
        """Return the checkpoint, or the output directory with the newest; None for initial ones."""
        return None if self.initial else self.checkpoint or Path(run.train.output)


def check_evaluation(run: RunConfig, weights: EvaluatedWeights) -> None:
    """Raise ValueError if inputs of an evaluation cannot be used, as far as torch is not needed.

    Args:
        run: Validated run configuration.
        weights: Weights that are evaluated.

    Raises:
        ValueError: There is no checkpoint, or data, weights, hardware or degrees cannot be used.
    """
    checkpoint, initial = weights.checkpoint, weights.initial
    if initial and checkpoint is not None:
        raise ValueError(
            f"--initial and --checkpoint {checkpoint}: leave one of the two out (in Python "
            "initial and checkpoint)"
        )
    if initial:
        if run.hf_weights is not None:
            check_headers(Path(run.hf_weights), run.model)
        check_start(run)
    elif checkpoint is not None:
        check_any(checkpoint)
    else:
        try:
            check_any(run.train.output)
        except NoCheckpointError as error:
            raise ValueError(
                f"train.output: {error}. To evaluate "
                f"{run.initial_weights}, which the run starts from, write --initial (in Python "
                "initial=True)"
            ) from None
    open_evaluated(run)
    hardware_for(run.hardware)
    step = {"data.samples": "stream", "train.sequences_per_step": run.parallel.data_parallel_degree}
    if problem := next(_degree_problems(run.with_values(step)), None):  # there is no step to share
        raise ValueError(problem.rule)
