"""Ablation of SPPO for one request: the speedup of each part, as in section 7 of the SPPO paper.

All rows use the same degrees and cuts. "none" is the paper's baseline: nothing is offloaded, whole
layers are recomputed. The paper reports speedups of 0.91 for offloading everything, 1.23 for
adaptive offload and 1.44 with MSP, for GPT-13B at 512K tokens on 64 A100s.

    python -m experiments.ablation configs/run/gpt_7b_512k_32gpu.yaml hardware.nodes=8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from experiments import harness
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.solver import solve
from sppo.schedule.costs import Costs, Links
from sppo.schedule.orders.names import LOOPED
from sppo.units import format_bytes

PAPER_SPEEDUPS = {"none": 1.0, "offload_all": 0.91, "sppo": 1.23, "sppo + MSP": 1.44}
"""Speedups that the SPPO paper reports, by name of the row; MSP is on top of adaptive offload."""

Row = tuple[str, EvaluatedCandidate, str]
"""Name of a configuration, the candidate, and a remark."""


def main() -> None:
    """Price the rows of a run file, print and write them."""
    options, run, hardware = harness.run_arguments(__doc__)
    rows = ablation(run, hardware=hardware)
    harness.print_table(
        ("", "step", "speedup", "paper", "device peak", ""),
        [
            (
                row["name"],
                f"{row['step_s']:.4g} s",
                f"{row['speedup']:.2f}x",
                "" if row["paper"] is None else f"{row['paper']:.2f}x",
                format_bytes(row["device_peak_bytes"]),
                "" if row["fits"] else "does not fit",
            )
            for row in rows
        ],
    )
    print("\n".join(f"{row['name']}: {row['note']}" for row in rows))
    harness.write_report(options.output, {**harness.header("simulated"), "rows": rows})


def ablation(run: RunConfig, *, hardware: HardwareSpec) -> list[dict[str, Any]]:
    """Return the figures of each row, with the degrees and cuts that are best for `run`.

    Rows begin with no part of SPPO and end with all parts; speedups are over the first row.

    Raises:
        ValueError: No candidate fits.
    """
    best = solve(run, hardware=hardware).best
    if best is None:
        raise ValueError(
            "nothing fits, so there is nothing to compare: sppo solve says what is short"
        )
    rows = [*_rows(best.candidate)]
    return [
        {
            "name": name,
            "policy": evaluated.candidate.policy,
            "schedule": evaluated.candidate.schedule,
            "step_s": evaluated.step_s,
            "speedup": rows[0][1].step_s / evaluated.step_s,
            "device_peak_bytes": evaluated.device_peak_bytes,
            "fits": evaluated.shortfall is None,
            "paper": PAPER_SPEEDUPS.get(name),
            "note": note,
        }
        for name, evaluated, note in rows
    ]


def _rows(best: Candidate) -> Iterator[Row]:
    plain = replace(best, schedule="sppo", virtual_stages=1, offload_ratio=None)
    yield "none", _option(plain, "recompute"), "no offload, layers recomputed"
    yield "none, nothing recomputed", _option(plain, "retain"), "where memory allows it"
    yield "offload_all", _option(plain, "offload_all"), "offloads everything"
    adaptive = _option(plain, "sppo")
    yield "sppo", adaptive, "offloads what hides"
    note = "retains what fits, offloads what hides, recomputes the rest"
    yield "hybrid", _option(plain, "hybrid"), note
    virtual = best.virtual_stages
    if virtual > 1:
        looped = replace(plain, schedule=LOOPED, virtual_stages=virtual)
        note = "passes the ranks so many times, stage after stage"
        yield f"hybrid, {virtual} stages on a rank", _option(looped, "hybrid"), note
    if plain.pipeline_parallel_degree > 1:
        yield from _multiplexed_rows(adaptive)


def _multiplexed_rows(adaptive: EvaluatedCandidate) -> Iterator[Row]:
    """Yield a row of MSP with priced messages, and one of MSP with free links as the bound."""
    candidate = replace(adaptive.candidate, schedule="sppo_msp")
    priced = evaluate_candidate(candidate)
    cuts = len(priced.program.cuts)
    note = f"{cuts} units cut over idle ranks" if cuts else "on these links no unit pays"
    yield "sppo + MSP", priced, note
    free = _FreeLinks(candidate, adaptive.placement)
    yield "sppo + MSP, free links", free, "the bound: weights and K/V are sent for nothing"


class _FreeLinks(EvaluatedCandidate):
    """Candidate whose messages take no time."""

    @cached_property
    def costs(self) -> Costs:
        """Cost tables of the step, without those of links."""
        return replace(super().costs, links=Links())


def _option(candidate: Candidate, policy: str) -> EvaluatedCandidate:
    return evaluate_candidate(replace(candidate, policy=policy))


if __name__ == "__main__":
    main()
