"""Answer of ``sppo solve`` with data.samples=documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

from sppo.cli.candidate import choices_json, degrees_json, memory_json, memory_screen, stages_json
from sppo.cli.explanation import explanation_json, explanation_screen
from sppo.cli.printing import Screen, Unbroken
from sppo.cli.solve_report import (
    DEGREES,
    Answer,
    Rows,
    answer_json,
    launch_lines,
    step_text,
    ways_table,
)
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.corpus.search import (
    CorpusSolution,
    DrawnSteps,
    PlannedDegrees,
    fullest_rank,
)
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.why_nothing_fits import model_text
from sppo.units import counted, format_bytes, format_count, format_tokens

_SHOWN_REFUSED = 4


def corpus_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values."""
    solution = answer.solution
    assert isinstance(solution, CorpusSolution), "an answer for samples"
    steps = solution.steps
    values = answer_json(
        answer,
        way_json=partial(_division_json, steps=steps),
        rejection_json=_refused_json,
        nearest=solution.rejected[0] if solution.rejected else None,
    )
    values["corpus"] = {
        "source": steps.source,
        "description": steps.description,
        "longest_sample": solution.run.sequence.length,
        "steps": [
            {"samples": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
            for lengths in steps.lengths
        ],
    }
    if solution.best is None:
        return values
    values["searched"] = {
        "divisions": solution.num_divisions,
        "divisions_planned": solution.num_planned,
    }
    if answer.improvements is not None:
        values["explanation"] = explanation_json(solution.best.plans[0].evaluated)
    return values


def _division_json(way: PlannedDegrees, *, steps: DrawnSteps) -> dict[str, Any]:
    """Return one way to divide the devices as JSON values."""
    rate = steps.num_tokens / way.seconds
    return {
        **degrees_json(way.degrees),
        "virtual_stages": way.longest.candidate.virtual_stages,
        "closed_form_step_s": way.closed_s / len(steps.lengths),
        "step_s": way.seconds / len(steps.lengths),
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / way.degrees.num_devices,
        "bubble_fraction": way.bubble_fraction,
        "node_host_peak_bytes": way.node_host_bytes,
        "steps": [_step_json(plan) for plan in way.plans],
        "memory": _fullest_json(way.fullest.evaluated),
        "longest_sample": {
            **choices_json(way.longest),
            "memory": _fullest_json(way.longest),
            "stages": stages_json(way.longest),
        },
    }


def _step_json(plan: StepPlan) -> dict[str, Any]:
    """Return one drawn step of the replica with the most work as JSON values."""
    evaluated, lengths = plan.evaluated, plan.evaluated.candidate.lengths
    return {
        "samples": plan.num_samples,
        "tokens": plan.tokens,
        "step_s": plan.step_s,
        "bubble_fraction": plan.bubble_fraction,
        "schedule": evaluated.candidate.schedule,
        "policy": evaluated.effective_policy,
        "chunks": {
            "count": len(lengths),
            "split": plan.num_split,
            "batched": plan.num_batched,
            "hybrid": plan.num_hybrid,
            "least_tokens": min(lengths),
            "median_tokens": int(median(lengths)),
            "most_tokens": max(lengths),
        },
        "paced": bool(evaluated.candidate.forwards_before_backward),
        "device_peak_bytes": evaluated.device_peak_bytes,
    }


def _fullest_json(evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return the memory of the fullest pipeline rank, by bucket, as JSON values."""
    rank = fullest_rank(evaluated.memory)
    return {"rank": rank, **memory_json(evaluated.memory[rank])}


def _refused_json(refused: Rejection) -> dict[str, Any]:
    """Return one refused division of the devices as JSON values."""
    return {
        **degrees_json(refused.degrees),
        "reason": refused.reason,
        "short_bytes": None if refused.shortfall is None else refused.shortfall.short_bytes,
        "longest_sample_fits": refused.steps,
    }


def corpus_screen(answer: Answer) -> Screen:
    """Yield the best division of the devices, its runners-up, packings and memory."""
    solution, best = answer.solution, answer.solution.best
    assert isinstance(solution, CorpusSolution), "an answer for samples"
    assert isinstance(best, PlannedDegrees), "an answer that fits"
    yield from _request_lines(solution)
    yield ways_table(answer, *_sections(solution, best))
    yield (
        f"searched: {counted(solution.num_divisions, 'way')} to divide the devices, each with a "
        f"step of the longest samples; of {solution.num_planned} the drawn steps were planned and "
        "simulated, and of the best every replica and the longest sample alone fit in all of them"
    )
    if answer.devices_left_over:
        yield f"{answer.devices_left_over} of {solution.hardware.num_devices} devices are left over"
    yield from launch_lines(answer)
    yield ""
    yield "the drawn step that takes most memory:"
    yield from memory_screen(best.fullest.evaluated)
    longest, rank = best.longest, fullest_rank(best.longest.memory)
    yield (
        f"a step of the longest samples, of {format_tokens(solution.run.sequence.length)} "
        f"tokens: {format_bytes(longest.memory[rank].device.total_bytes)} on rank {rank}, "
        f"policy {longest.effective_policy}, K and V {longest.kv}"
    )
    if solution.rejected:
        yield f"{len(solution.rejected)} other ways do not work (--json lists them):"
    for refused in solution.rejected[:_SHOWN_REFUSED]:
        yield f" {refused.degrees.text()}: {refused.reason}"
    if answer.improvements is not None:
        yield from explanation_screen(best.plans[0].evaluated)
    if answer.output is not None:
        yield Unbroken(f"written {answer.output}: {answer.train}")


def _request_lines(solution: CorpusSolution) -> Iterator[str]:
    """Yield lines about the model, the machine and the drawn steps."""
    run, steps = solution.run, solution.steps
    samples = [len(lengths) for lengths in steps.lengths]
    longest = ", ".join(format_tokens(max(lengths)) for lengths in steps.lengths)
    yield (
        f"{model_text(run)}, samples of up to {format_tokens(run.sequence.length)} tokens, "
        f"{run.train.dtype}"
    )
    yield f"on {hardware_line(solution.hardware)}"
    yield (
        f"{len(samples)} steps drawn from {steps.source}, of {_span(samples)} samples and "
        f"{format_count(steps.num_tokens / len(samples))} tokens each; the longest have {longest}"
    )


def _sections(solution: CorpusSolution, best: PlannedDegrees) -> Iterator[Rows]:
    """Yield rows of the choices, of the simulated step time, and of the peaks of memory."""
    tokens, count = solution.steps.num_tokens, len(solution.steps.lengths)

    def candidates(way: PlannedDegrees) -> list[EvaluatedCandidate]:
        return [plan.evaluated for plan in way.plans]

    def chunks(way: PlannedDegrees) -> list[tuple[int, ...]]:
        return [evaluated.candidate.lengths for evaluated in candidates(way)]

    yield {
        **DEGREES,
        "stages on a rank": lambda way: str(way.longest.candidate.virtual_stages),
        "schedule": lambda way: _each(one.candidate.schedule for one in candidates(way)),
        "chunks of a step": lambda way: _span(map(len, chunks(way))),
        "  tokens, median": lambda way: _span(int(median(lengths)) for lengths in chunks(way)),
        "  tokens, most": lambda way: _span(map(max, chunks(way))),
        "policy": lambda way: _each(one.effective_policy for one in candidates(way)),
    }
    yield {
        "step": lambda way: step_text(way.seconds / count),
        "against the best": lambda way: f"{way.seconds / best.seconds:.3f}x",
        "in closed form": lambda way: step_text(way.closed_s / count),
        "tokens/s in total": lambda way: format_count(tokens / way.seconds),
        "tokens/s a device": lambda way: f"{tokens / way.seconds / way.degrees.num_devices:.4g}",
        "bubble": lambda way: f"{way.bubble_fraction:.1%}",
    }
    memory = {
        "device peak": lambda way: format_bytes(way.fullest.evaluated.device_peak_bytes),
        "  longest samples": lambda way: format_bytes(way.longest.device_peak_bytes),
    }
    if solution.hardware.device.kind != "cpu":
        memory["host memory of a node"] = lambda way: format_bytes(way.node_host_bytes)
    yield memory


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
