"""Answer of ``sppo solve`` with data.samples=documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from sppo.cli.printing import Screen
from sppo.cli.solution.answer import DEGREES, Answer, Rows, step_text
from sppo.cli.solution.candidate import choices_json, memory_json, memory_screen, stages_json
from sppo.planning.corpus.search import CorpusSolution, PlannedDegrees, fullest_rank
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.why_nothing_fits import model_text
from sppo.units import counted, format_bytes, format_count, format_tokens


class CorpusAnswer(Answer[PlannedDegrees]):
    """Answer for samples: ways to divide the devices have plans of steps that were drawn."""

    solution: CorpusSolution

    @property
    def ways(self) -> Sequence[PlannedDegrees]:
        """Best degrees with their plans, then the runners-up; empty if nothing fits."""
        best = self.solution.best
        return () if best is None else (best, *self.solution.runners_up)

    @property
    def _best(self) -> PlannedDegrees:
        assert self.solution.best is not None, "an answer that fits"
        return self.solution.best

    @property
    def _explained(self) -> EvaluatedCandidate:
        return self._best.plans[0].evaluated

    def _way_json(self, way: PlannedDegrees) -> dict[str, Any]:
        steps = self.solution.steps
        rate = steps.num_tokens / way.seconds
        return {
            **way.degrees.by_name,
            "virtual_stages": way.longest.candidate.virtual_stages,
            "closed_form_step_s": way.closed_s / len(steps.lengths),
            "step_s": way.step_s,
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

    def _more_json(self) -> dict[str, Any]:
        solution, steps = self.solution, self.solution.steps
        corpus = {
            "source": steps.source,
            "description": steps.description,
            "longest_sample": solution.run.sequence.length,
            "steps": [
                {"samples": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
                for lengths in steps.lengths
            ],
        }
        searched = {
            "divisions": solution.num_divisions,
            "divisions_planned": solution.num_planned,
        }
        return {"corpus": corpus, "searched": searched}

    @property
    def _request_line(self) -> str:
        run = self.solution.run
        up_to = f"samples of up to {format_tokens(run.sequence.length)} tokens"
        return f"{model_text(run)}, {up_to}, {run.train.dtype}"

    def _notes(self) -> Iterator[str]:
        solution, steps = self.solution, self.solution.steps
        samples = [len(lengths) for lengths in steps.lengths]
        longest = ", ".join(format_tokens(max(lengths)) for lengths in steps.lengths)
        yield (
            f"{len(samples)} steps drawn from {steps.source}, of {_span(samples)} samples and "
            f"{format_count(steps.num_tokens / len(samples))} tokens each; the longest have "
            f"{longest}"
        )
        yield (
            f"searched: {counted(solution.num_divisions, 'way')} to divide the devices, each with "
            f"a step of the longest samples; of {solution.num_planned} the drawn steps were "
            "planned and simulated, and of the best every replica and the longest sample alone fit "
            "in all of them"
        )

    def _memory(self) -> Screen:
        yield "the drawn step that takes most memory:"
        yield from memory_screen(self._best.fullest.evaluated)
        longest, rank = self._best.longest, fullest_rank(self._best.longest.memory)
        yield (
            f"a step of the longest samples, of "
            f"{format_tokens(self.solution.run.sequence.length)} tokens: "
            f"{format_bytes(longest.memory[rank].device.total_bytes)} on rank {rank}, policy "
            f"{longest.effective_policy}, K and V {longest.kv}"
        )

    def _sections(self) -> Iterator[Rows[PlannedDegrees]]:
        tokens, count = self.solution.steps.num_tokens, len(self.solution.steps.lengths)

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
            **self._speed_rows(lambda way: tokens / way.seconds),
            "in closed form": lambda way: step_text(way.closed_s / count),
            "bubble": lambda way: f"{way.bubble_fraction:.1%}",
        }
        memory: dict[str, Callable[[PlannedDegrees], str]] = {
            "device peak": lambda way: format_bytes(way.fullest.evaluated.device_peak_bytes),
            "  longest samples": lambda way: format_bytes(way.longest.device_peak_bytes),
        }
        if self.solution.hardware.device.kind != "cpu":
            memory["host memory of a node"] = lambda way: format_bytes(way.node_host_bytes)
        yield memory


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
            **{kind: plan.kinds[kind] for kind in ("split", "batched", "hybrid")},
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


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
