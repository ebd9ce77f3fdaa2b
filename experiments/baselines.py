"""Longest sequence that fits, and step time at the run's length, for baseline methods and SPPO.

Baselines are priced on the same machine by the same cost model as SPPO's own plans
(:mod:`experiments.baseline_cost`).

    python -m experiments.baselines configs/run/gpt_7b_512k_32gpu.yaml hardware.nodes=16
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from experiments import harness
from experiments.baseline_cost import (
    BaselineStep,
    baseline_memory,
    baseline_step,
    fits,
    host_bytes,
)
from experiments.baseline_methods import MEGATRON, METHODS, ULYSSES, Method
from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.longest_sequence import longest_tokens
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.feasibility import longest_sequence
from sppo.planning.search.solver import solve
from sppo.units import KIB, format_bytes, format_tokens

HOST = "host"
"""Name of host memory in `Baseline.largest_bucket`."""
SPPO = "SPPO"
"""Name of SPPO in `Baseline.method`."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Longest sequence and step time of one method.

    Attributes:
        method: Name of the method.
        longest_tokens: Tokens of the longest sequence that fits, in whole Ki; 0 if not even 1Ki
            fits.
        degrees: Degrees with which the longest sequence fits; None for SPPO, whose solver chooses.
        largest_bucket: Largest memory bucket of the device 1Ki tokens beyond the longest sequence,
            without "_bytes"; "host" if host memory is the limit; None for SPPO.
        paper: Longest sequence that the SPPO paper reports; empty for other models and machines.
        step_s: Seconds of a step at the length of the run; None if that does not fit.
        tokens_per_s_per_gpu: Tokens per second and device at the length of the run.
        node_host_bytes: Host memory of a node at the length of the run.
    """

    method: str
    longest_tokens: int
    degrees: Degrees | None = None
    largest_bucket: str | None = None
    paper: str = ""
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    node_host_bytes: int | None = None


def main() -> None:
    """Search the longest sequence of each way to train, print and write the rows."""
    options, run, hardware = harness.run_arguments(__doc__)
    rows = baselines(run, hardware=hardware, evaluated=solve(run, hardware=hardware).best)
    length = format_tokens(run.sequence.length)
    harness.print_table(
        (
            "trained with",
            "longest",
            "SP/PP/DP",
            "short of",
            "paper",
            length,
            "tokens/s/GPU",
            "host of a node",
        ),
        [
            (
                row.method,
                format_tokens(row.longest_tokens) if row.longest_tokens else "not 1Ki",
                "" if row.degrees is None else _degrees_text(row.degrees),
                (row.largest_bucket or "").replace("_", " "),
                row.paper,
                "does not fit" if row.step_s is None else f"{row.step_s:.1f} s",
                "" if row.tokens_per_s_per_gpu is None else f"{row.tokens_per_s_per_gpu:.0f}",
                "" if row.node_host_bytes is None else format_bytes(row.node_host_bytes),
            )
            for row in rows
        ],
    )
    report = {**harness.header("analytic"), "rows": [asdict(row) for row in rows]}
    harness.write_report(options.output, report)


def _degrees_text(degrees: Degrees) -> str:
    return f"{degrees.sequence_parallel}/{degrees.pipeline_parallel}/{degrees.data_parallel}"


def baselines(
    run: RunConfig,
    *,
    hardware: HardwareSpec,
    evaluated: EvaluatedCandidate | None = None,
) -> tuple[Baseline, ...]:
    """Return every baseline method on all devices of `hardware`, then SPPO.

    Args:
        run: Validated run configuration; SPPO follows all its keys, baselines the model, the
            sequence length and the dtype.
        hardware: Description of the machine.
        evaluated: SPPO's candidate at the run's length, for its step time.
    """
    claims, rows = _paper_claims(run, hardware), []
    for method in METHODS:
        found = baseline(run, hardware=hardware, method=method)
        rows.append(replace(found, paper=claims.get(method.name, "")))
    ours = Baseline(SPPO, longest_sequence(run, hardware), paper=claims.get(SPPO, ""))
    if evaluated is not None and evaluated.shortfall is None:
        candidate = evaluated.candidate
        tokens = sum(candidate.lengths) * candidate.sequences * candidate.data_parallel_degree
        rate = tokens / evaluated.step_s / candidate.num_devices
        ours = replace(
            ours,
            step_s=evaluated.step_s,
            tokens_per_s_per_gpu=rate,
            node_host_bytes=evaluated.node_host_bytes,
        )
    return (*rows, ours)


def baseline(run: RunConfig, *, hardware: HardwareSpec, method: Method) -> Baseline:
    """Return the longest sequence of one method, and its step at the length of `run`."""
    best = Baseline(method.name, 0)
    for degrees in method.degrees(run.model, hardware):

        def fits_there(tokens: int, degrees: Degrees = degrees) -> bool:
            memory = baseline_memory(
                run, hardware=hardware, method=method, degrees=degrees, length=tokens
            )
            return fits(memory, hardware=hardware)

        longest = longest_tokens(fits_there)
        if longest > best.longest_tokens:
            best = replace(best, longest_tokens=longest, degrees=degrees)
    if best.degrees is None:
        return best
    beyond = baseline_memory(
        run,
        hardware=hardware,
        method=method,
        degrees=best.degrees,
        length=best.longest_tokens + KIB,
    )
    on_device = beyond.device.total_bytes > hardware.device.usable_bytes
    bucket = beyond.device.largest.removesuffix("_bytes") if on_device else HOST
    best = replace(best, largest_bucket=bucket)
    step = _fastest_step(run, hardware, method)
    if step is None:
        return best
    return replace(
        best,
        step_s=step.step_s,
        tokens_per_s_per_gpu=step.tokens_per_s_per_gpu,
        node_host_bytes=hardware.node.num_devices * host_bytes(step.memory),
    )


def _fastest_step(run: RunConfig, hardware: HardwareSpec, method: Method) -> BaselineStep | None:
    """Return the fastest step of a method at the run's length; None if no degrees fit."""
    steps = [
        baseline_step(
            run, hardware=hardware, method=method, degrees=degrees, length=run.sequence.length
        )
        for degrees in method.degrees(run.model, hardware)
    ]
    fitting = [step for step in steps if fits(step.memory, hardware=hardware)]
    return max(fitting, key=lambda step: step.tokens_per_s_per_gpu, default=None)


def _paper_claims(run: RunConfig, hardware: HardwareSpec) -> dict[str, str]:
    """Return the SPPO paper's results for GPT-7B on 32 and 128 A100-80GB, by method."""
    if run.model.preset != "gpt-7b" or not hardware.name.startswith("a100-80g"):
        return {}
    if hardware.num_devices == 32:
        return {
            MEGATRON: "896Ki",
            ULYSSES: f"{run.model.num_heads} ranks",
            SPPO: "1Mi",
        }
    return {SPPO: "4Mi"} if hardware.num_devices == 128 else {}


if __name__ == "__main__":
    main()
