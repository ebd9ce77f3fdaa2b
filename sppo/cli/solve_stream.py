"""Answer of ``sppo solve`` for the stream: the best candidate, runners-up, rejected degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from sppo.cli.candidate import (
    choices_json,
    degrees_json,
    memory_screen,
    policy_text,
    shortfall_json,
    stages_json,
)
from sppo.cli.explanation import explanation_json, explanation_screen
from sppo.cli.printing import Screen, Unbroken, columns
from sppo.cli.solve_report import (
    DEGREES,
    Answer,
    Rows,
    answer_json,
    launch_lines,
    step_text,
    ways_table,
)
from sppo.config.run import RunConfig
from sppo.cost.state_tiers import ON_DEVICE
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.advice import too_long_for
from sppo.planning.make_plan import predict
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.simulated_candidate import simulated_device_bytes
from sppo.planning.search.solver import Solution, nearest_rejection
from sppo.planning.why_nothing_fits import rejected_groups, run_line
from sppo.units import counted, format_bytes, format_count, format_duration

MFU_DEFINITION = (
    "causal model FLOPs, nothing recomputed (6·weights·tokens + 6·S²·heads·head size a layer), "
    "over time · devices · peak"
)


def stream_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values."""
    solution = answer.solution
    assert isinstance(solution, Solution), "an answer for the stream"
    values = answer_json(
        answer,
        way_json=partial(candidate_json, solution.run),
        rejection_json=_rejection_json,
        nearest=nearest_rejection(solution.rejected),
    )
    if solution.best is None:
        values["too_long"] = too_long_for(solution.run, hardware=solution.hardware)
        return values
    values["by_num_subsequences"] = [
        {
            "num_subsequences": len(evaluated.candidate.lengths),
            "step_s": evaluated.step_s,
            "policy": evaluated.effective_policy,
            "kv": evaluated.kv,
            "state": asdict(evaluated.candidate.state),
            "simulated": evaluated.simulated is not None,
        }
        for evaluated in solution.by_num_subsequences
    ]
    values["mfu_definition"] = MFU_DEFINITION
    values["improvements"] = None
    if answer.improvements is not None:
        values["improvements"] = [asdict(improvement) for improvement in answer.improvements]
        values["explanation"] = explanation_json(solution.best)
    return values


def candidate_json(run: RunConfig, evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return an evaluated candidate as JSON values."""
    candidate, simulated = evaluated.candidate, simulated_device_bytes(evaluated)
    predicted = asdict(predict(run, evaluated))
    return {
        **degrees_json(evaluated.degrees),
        **choices_json(evaluated),
        "virtual_stages": candidate.virtual_stages,
        "offload_ratios": list(predicted.pop("offload_ratios")),
        "kv_recomputed": candidate.kv_recomputed,
        "activation_tier": candidate.tier,
        "sequences_per_replica": candidate.sequences,
        "predicted": predicted,
        "node_host_peak_bytes": evaluated.node_host_bytes,
        "simulated_device_bytes": None if simulated is None else list(simulated),
        "stages": stages_json(evaluated),
    }


def _rejection_json(rejection: Rejection) -> dict[str, Any]:
    return {
        **degrees_json(rejection.degrees),
        "num_subsequences": rejection.num_subsequences,
        "policy": rejection.policy,
        "reason": rejection.reason,
        "shortfall": shortfall_json(rejection.shortfall),
    }


def stream_screen(answer: Answer) -> Screen:
    """Yield the best candidate, its runners-up, launch commands, memory, and rejected degrees."""
    solution, best = answer.solution, answer.solution.best
    assert isinstance(solution, Solution), "an answer for the stream"
    assert isinstance(best, EvaluatedCandidate), "an answer that fits"
    yield run_line(solution.run)
    yield f"on {hardware_line(solution.hardware)}"
    yield ways_table(answer, *_sections(answer))
    yield f"policy {best.effective_policy}: {policy_text(best)}"
    yield f"MFU: {MFU_DEFINITION}"
    if any(other.step_s < best.step_s for other in solution.runners_up):
        yield "of divisions within 1 % of the fastest, the best takes least host memory"
    if left := answer.devices_left_over:
        yield (
            f"{left} of {counted(solution.hardware.num_devices, 'device')} "
            f"{'is' if left == 1 else 'are'} left over: more sequences per step "
            "(train.sequences_per_step) would use them"
        )
    yield from launch_lines(answer)
    if answer.improvements:
        yield ""
        yield "not asked for, and it would pay (tokens/s a device, against the best):"
        yield columns(
            [
                f" {improvement.change}",
                f"{improvement.gain:.2f}x",
                f"{step_text(improvement.step_s)} a step",
                f"{format_bytes(improvement.device_peak_bytes)} a device",
            ]
            for improvement in answer.improvements
        )
    yield ""
    yield from memory_screen(best)
    groups = rejected_groups(solution.rejected)
    total = sum(group.count for group in groups)
    if total == 1:
        yield "1 other way does not work (--json lists it):"
    elif total:
        yield f"{total} other ways do not work (--json lists them):"
    for group in groups:
        yield f" {group.count:>3} × {group.reason}"
        if group.example:
            yield f"     {group.example}"
    if answer.improvements is not None:
        yield from explanation_screen(best)
    if answer.output is not None:
        yield Unbroken(f"written {answer.output}: sppo simulate {answer.output}, {answer.train}")


def _sections(answer: Answer) -> Iterator[Rows]:
    """Yield rows of the choices, of the predicted step time, and of the peaks of memory.

    A row is left out if it has the same usual value for every candidate.
    """
    best, hardware = answer.ways[0], answer.solution.hardware
    predicted = partial(predict, answer.solution.run)
    choices = {
        **DEGREES,
        "devices used": lambda o: str(o.degrees.num_devices),
        "subsequences (N)": lambda o: str(len(o.candidate.lengths)),
        "tokens of each": lambda o: _ends(o.candidate.lengths, str),
        "schedule": lambda o: o.candidate.schedule,
        "stages on a rank": lambda o: str(o.candidate.virtual_stages),
        "K/V placement": lambda o: o.kv,
        "state": lambda o: o.candidate.state.text(),
        "policy": lambda o: o.effective_policy,
        "offload ratio": lambda o: _ends(predicted(o).offload_ratios, "{:.2f}".format),
        "  its mean": lambda o: f"{np.mean(predicted(o).offload_ratios):.2f}",
    }
    step = {
        "step": lambda o: step_text(o.step_s),
        "against the best": lambda o: f"{o.step_s / best.step_s:.3f}x",
        "step time is": lambda o: "simulated" if predicted(o).simulated else "closed form",
        "tokens/s a device": lambda o: f"{predicted(o).tokens_per_s_per_gpu:.4g}",
        "tokens/s in total": lambda o: format_count(
            predicted(o).tokens_per_s_per_gpu * o.degrees.num_devices
        ),
        "MFU": lambda o: f"{predicted(o).mfu:.1%}",
        "bubble": lambda o: f"{predicted(o).bubble_fraction:.1%}",
        "exposed copies": lambda o: format_duration(predicted(o).exposed_copy_s),
    }
    memory = {"device peak": lambda o: format_bytes(predicted(o).device_peak_bytes)}
    if hardware.device.kind != "cpu":
        memory["host peak"] = lambda o: format_bytes(predicted(o).host_peak_bytes)
        memory["  of a node"] = lambda o: format_bytes(o.node_host_bytes)
    memory["disk peak"] = lambda o: format_bytes(predicted(o).disk_peak_bytes)
    usual = {
        "devices used": str(best.degrees.num_devices),
        "stages on a rank": "1",
        "K/V placement": "retained",
        "state": ON_DEVICE.text(),
        "  its mean": "0.00",
        "  of a node": format_bytes(0),
        "disk peak": "" if hardware.node.disk_bytes else format_bytes(0),
    }
    for rows in (choices, step, memory):
        yield {
            name: text
            for name, text in rows.items()
            if set(map(text, answer.ways)) != {usual.get(name)}
        }


def _ends(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return the first value as text, and the last one if its text differs."""
    return " … ".join(dict.fromkeys((show(values[0]), show(values[-1]))))
