"""Ablation of SPPO for one request: the speedup of each part, as in section 7 of the SPPO paper.

All rows use the same degrees and cuts. "none" is the paper's baseline: nothing is offloaded, whole
layers are recomputed. The paper reports speedups of 0.91 for offloading everything, 1.23 for
adaptive offload and 1.44 with MSP, for GPT-13B at 512K tokens on 64 A100s.

    python -m experiments.ablation configs/run/gpt_7b_512k_32gpu.yaml hardware.nodes=8
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from experiments import harness
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, with_program
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.simulated_candidate import simulate_candidate
from sppo.planning.search.solver import solve
from sppo.schedule.costs import Links
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.simulation.simulated_step import simulate_step
from sppo.units import format_bytes

PAPER_SPEEDUPS = {"none": 1.0, "offload_all": 0.91, "sppo": 1.23, "sppo + MSP": 1.44}
"""Speedups that the SPPO paper reports, by name of the row; MSP is on top of adaptive offload."""


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One configuration of the ablation.

    Attributes:
        name: Name of the configuration.
        policy: Activation policy.
        schedule: Name of the schedule.
        step_s: Simulated seconds of a step.
        speedup: Speedup over the first row.
        device_peak_bytes: Peak memory of the fullest device.
        fits: Whether the configuration fits in memory.
        paper: Speedup that the SPPO paper reports; None if it reports none.
        note: Remark on the row.
    """

    name: str
    policy: str
    schedule: str
    step_s: float
    speedup: float
    device_peak_bytes: int
    fits: bool
    paper: float | None = None
    note: str = ""


def main() -> None:
    """Price the rows of a run file, print and write them."""
    options, run, hardware = harness.run_arguments(__doc__)
    rows = ablation(run, hardware=hardware)
    harness.print_table(
        ("", "step", "speedup", "paper", "device peak", ""),
        [
            (
                row.name,
                f"{row.step_s:.4g} s",
                f"{row.speedup:.2f}x",
                "" if row.paper is None else f"{row.paper:.2f}x",
                format_bytes(row.device_peak_bytes),
                "" if row.fits else "does not fit",
            )
            for row in rows
        ],
    )
    print("\n".join(f"{row.name}: {row.note}" for row in rows))
    report = {**harness.header("simulated"), "rows": [asdict(row) for row in rows]}
    harness.write_report(options.output, report)


def ablation(run: RunConfig, *, hardware: HardwareSpec) -> tuple[AblationRow, ...]:
    """Return the rows of an ablation, with the degrees and cuts that are best for `run`.

    Rows begin with no part of SPPO and end with all parts.

    Raises:
        ValueError: No candidate fits.
    """
    best = solve(run, hardware=hardware).best
    if best is None:
        raise ValueError(
            "nothing fits, so there is nothing to compare: sppo solve says what is short"
        )
    plain = replace(best.candidate, schedule="sppo", virtual_stages=1, offload_ratio=None)
    rows: list[AblationRow] = []
    rows.append(_row("none", _option(plain, "recompute"), rows, "no offload, layers recomputed"))
    kept = _option(plain, "retain")
    rows.append(_row("none, nothing recomputed", kept, rows, "where memory allows it"))
    everything = _option(plain, "offload_all")
    rows.append(_row("offload_all", everything, rows, _offload_note(everything)))
    adaptive = _option(plain, "sppo")
    rows.append(_row("sppo", adaptive, rows, "offloads what hides"))
    hybrid = _option(plain, "hybrid")
    rows.append(
        _row("hybrid", hybrid, rows, "retains what fits, offloads what hides, recomputes the rest")
    )
    virtual = best.candidate.virtual_stages
    if virtual > 1:
        looped = replace(plain, schedule=LOOPED, virtual_stages=virtual)
        note = "passes the ranks so many times, stage after stage"
        rows.append(
            _row(f"hybrid, {virtual} stages on a rank", _option(looped, "hybrid"), rows, note)
        )
    if plain.pipeline_parallel_degree > 1:
        rows += _multiplexed_rows(adaptive, rows)
    return tuple(rows)


def _multiplexed_rows(adaptive: EvaluatedCandidate, rows: list[AblationRow]) -> list[AblationRow]:
    """Return a row of MSP with priced messages, and one of MSP with free links as the bound."""
    candidate = replace(adaptive.candidate, schedule="sppo_msp")
    evaluated = evaluate_candidate(candidate)
    priced = simulate_candidate(evaluated)
    cuts = len(priced.program.cuts) if priced.program is not None else 0
    note = f"{cuts} units cut over idle ranks" if cuts else "on these links no unit pays"
    costs = replace(adaptive.costs, links=Links())
    program = candidate.program(costs)
    free = with_program(replace(adaptive, candidate=candidate), program=program)
    free = replace(free, simulated=simulate_step(program, costs=costs))
    return [
        _row("sppo + MSP", priced, rows, note),
        _row(
            "sppo + MSP, free links", free, rows, "the bound: weights and K/V are sent for nothing"
        ),
    ]


def _option(candidate: Candidate, policy: str) -> EvaluatedCandidate:
    return simulate_candidate(evaluate_candidate(replace(candidate, policy=policy)))


def _row(
    name: str, evaluated: EvaluatedCandidate, rows: list[AblationRow], note: str
) -> AblationRow:
    baseline = rows[0].step_s if rows else evaluated.step_s
    return AblationRow(
        name,
        evaluated.candidate.policy,
        evaluated.candidate.schedule,
        evaluated.step_s,
        baseline / evaluated.step_s,
        evaluated.device_peak_bytes,
        evaluated.shortfall is None,
        PAPER_SPEEDUPS.get(name),
        note,
    )


def _offload_note(evaluated: EvaluatedCandidate) -> str:
    """Return a note on the copy rate that offloading everything needs to hide behind forwards."""
    costs = evaluated.costs
    busiest = int(np.argmax(costs.offload_bytes.sum(axis=1)))
    seconds = float(costs.forward_s[busiest].sum())
    rate = float(costs.offload_bytes[busiest].sum()) / seconds
    return f"hides behind forwards from {rate / 1e9:.1f} GB/s per device on average"


if __name__ == "__main__":
    main()
