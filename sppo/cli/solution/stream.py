"""Answer of ``sppo solve`` for the stream: the best candidate, runners-up, rejected degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from sppo.cli.printing import Screen
from sppo.cli.solution.answer import DEGREES, Answer, Rows
from sppo.cli.solution.candidate import (
    choices_json,
    memory_screen,
    policy_text,
    stages_json,
    states_line,
)
from sppo.cost.state_tiers import ON_DEVICE
from sppo.planning.make_plan import predict
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution
from sppo.planning.why_nothing_fits import run_line
from sppo.units import format_bytes, format_duration

_MFU = (
    "causal model FLOPs, nothing recomputed (6·weights·tokens + 6·S²·heads·head size a layer with "
    "attention), over time · devices · peak"
)
_MFU_OF_FROZEN = "; 4·weights·tokens of frozen weights, forward alone in layers without backward"


class StreamAnswer(Answer[EvaluatedCandidate]):
    """Answer for the stream: ways to divide the devices are evaluated candidates."""

    solution: Solution

    @property
    def ways(self) -> Sequence[EvaluatedCandidate]:
        """Best candidate, then the runners-up; empty if nothing fits."""
        best = self.solution.best
        return () if best is None else (best, *self.solution.runners_up)

    @property
    def _explained(self) -> EvaluatedCandidate:
        assert self.solution.best is not None, "an answer that fits"
        return self.solution.best

    def _way_json(self, way: EvaluatedCandidate) -> dict[str, Any]:
        candidate = way.candidate
        predicted = asdict(predict(way))
        return {
            **way.degrees.by_name,
            **choices_json(way),
            "virtual_stages": candidate.virtual_stages,
            "offload_ratios": list(predicted.pop("offload_ratios")),
            "kv_recomputed": candidate.kv_recomputed,
            "windowed_kv": candidate.windowed_kv,
            "activation_tier": candidate.tier,
            "sequences_per_replica": candidate.sequences,
            "predicted": predicted,
            "node_host_peak_bytes": way.node_host_bytes,
            "simulated_device_bytes": list(way.simulated_bytes),
            "stages": stages_json(way),
        }

    def _more_json(self) -> dict[str, Any]:
        solution = self.solution
        if solution.best is None:
            return {}
        by_count = [
            {
                "num_subsequences": len(evaluated.candidate.lengths),
                "step_s": evaluated.step_s,
                "policy": evaluated.effective_policy,
                "kv": evaluated.kv,
                "state": asdict(evaluated.candidate.state),
            }
            for evaluated in solution.by_num_subsequences
        ]
        return {"by_num_subsequences": by_count, "mfu_definition": self._mfu}

    @property
    def _mfu(self) -> str:
        """Definition of the model FLOPs utilization."""
        freezes = not self._explained.candidate.workload.trainable.is_everything
        return _MFU + _MFU_OF_FROZEN * freezes

    @property
    def _request_line(self) -> str:
        return run_line(self.solution.run)

    def _notes(self) -> Iterator[str]:
        best = self._explained
        yield f"policy {best.effective_policy}: {policy_text(best)}"
        yield from states_line(best.candidate)
        yield f"MFU: {self._mfu}"
        if any(other.step_s < best.step_s for other in self.solution.runners_up):
            yield "of divisions within 1 % of the fastest, the best takes least host memory"

    def _memory(self) -> Screen:
        return memory_screen(self._explained)

    def _sections(self) -> Iterator[Rows[EvaluatedCandidate]]:
        """Yield rows of the choices, of the predicted step time, and of the peaks of memory.

        A row is left out if it has the same usual value for every candidate.
        """
        best, hardware = self.ways[0], self.solution.hardware
        choices: Rows[EvaluatedCandidate] = {
            **DEGREES,
            "devices used": lambda o: str(o.degrees.num_devices),
            "subsequences (N)": lambda o: str(len(o.candidate.lengths)),
            "tokens of each": lambda o: _ends(o.candidate.lengths, str),
            "schedule": lambda o: o.candidate.schedule,
            "stages on a rank": lambda o: str(o.candidate.virtual_stages),
            "K/V placement": lambda o: o.kv,
            "  in windows": lambda o: o.candidate.windowed_kv or "retained",
            "state": lambda o: o.candidate.state.text(),
            "policy": lambda o: o.effective_policy,
            "offload ratio": lambda o: _ends(sorted(predict(o).offload_ratios), "{:.2f}".format),
            "  its mean": lambda o: f"{np.mean(predict(o).offload_ratios):.2f}",
        }
        step: Rows[EvaluatedCandidate] = {
            **self._speed_rows(
                lambda o: predict(o).tokens_per_s_per_gpu * o.degrees.num_devices,
            ),
            "step time is": lambda o: "simulated",
            "MFU": lambda o: f"{predict(o).mfu:.1%}",
            "bubble": lambda o: f"{predict(o).bubble_fraction:.1%}",
            "exposed copies": lambda o: format_duration(predict(o).exposed_copy_s),
        }
        memory: dict[str, Callable[[EvaluatedCandidate], str]] = {
            "device peak": lambda o: format_bytes(predict(o).device_peak_bytes)
        }
        if hardware.device.kind != "cpu":
            memory["host peak"] = lambda o: format_bytes(predict(o).host_peak_bytes)
            memory["  of a node"] = lambda o: format_bytes(o.node_host_bytes)
        memory["disk peak"] = lambda o: format_bytes(predict(o).disk_peak_bytes)
        usual = {
            "devices used": str(best.degrees.num_devices),
            "stages on a rank": "1",
            "K/V placement": "retained",
            "  in windows": "retained",
            "state": ON_DEVICE.text(),
            "  its mean": "0.00",
            "  of a node": format_bytes(0),
            "disk peak": "" if hardware.node.disk_bytes else format_bytes(0),
        }
        for rows in (choices, step, memory):
            yield {
                name: text
                for name, text in rows.items()
                if set(map(text, self.ways)) != {usual.get(name)}
            }


def _ends(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return the first value as text, and the last one if its text differs."""
    return " … ".join(dict.fromkeys((show(values[0]), show(values[-1]))))
