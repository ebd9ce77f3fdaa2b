"""Checks of a run file without a start of the run, and of the inputs of an evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sppo.checkpoint.newest import NoCheckpointError, check_any
from sppo.config import RunConfig
from sppo.config.problems import Problem
from sppo.data.run_tokens import open_evaluated
from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for
from sppo.model.hf_files import check_headers
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.run_plan import plan_run
from sppo.training.start import input_problems, problems_of_check

_UNBOUNDED_BYTES = 1 << 60
"""Memory of a test plan, so that it can fail only for reasons other than memory."""


def run_file_problems(run: RunConfig) -> list[Problem]:
    """Return the problems for which `sppo train` or `sppo eval` would fail with enough memory."""
    problems = list(input_problems(run))
    if not problems:  # planning requires valid inputs
        from sppo.training.state import check_weights

        activations = run.activations.policy
        problems = [
            *problems_of_check("model.from_hf", run.model.from_hf, lambda: check_weights(run)),
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
        if run.model.from_hf is not None:
            check_headers(Path(run.model.from_hf), run.model)
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
