"""Longest sequence that fits, and step time at the run's length, for baseline methods and SPPO.

Baselines are priced on the same machine by the same cost model as SPPO's own plans
(:mod:`experiments.baseline_methods`).

    python -m experiments.baselines configs/run/gpt_7b_512k_32gpu.yaml hardware.nodes=16
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from experiments import harness
from experiments.baseline_methods import MEGATRON, METHODS, ULYSSES, Method, fits, host_bytes
from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.longest_sequence import longest_sequence, longest_tokens
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
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
    rows = baselines(run, hardware, solve(run, hardware=hardware).best)
    headings = ("trained with", "longest", "SP/PP/DP", "short of", "paper")
    length = format_tokens(run.sequence.length)
    harness.print_table(
        (*headings, length, "tokens/s/GPU", "host of a node"), [_cells(row) for row in rows]
    )
    report = {**harness.header("analytic"), "rows": [asdict(row) for row in rows]}
    harness.write_report(options.output, report)


def _cells(row: Baseline) -> tuple[str, ...]:
    degrees = row.degrees
    return (
        row.method,
        format_tokens(row.longest_tokens) if row.longest_tokens else "not 1Ki",
        ""
        if degrees is None
        else f"{degrees.sequence_parallel}/{degrees.pipeline_parallel}/{degrees.data_parallel}",
        (row.largest_bucket or "").replace("_", " "),
        row.paper,
        "does not fit" if row.step_s is None else f"{row.step_s:.1f} s",
        "" if row.tokens_per_s_per_gpu is None else f"{row.tokens_per_s_per_gpu:.0f}",
        "" if row.node_host_bytes is None else format_bytes(row.node_host_bytes),
    )


def baselines(
    run: RunConfig, hardware: HardwareSpec, evaluated: EvaluatedCandidate | None = None
) -> tuple[Baseline, ...]:
    """Return every baseline method on all devices of `hardware`, then SPPO.

    Args:
        run: Validated run configuration; SPPO follows all its keys, baselines the model, the
            sequence length and the dtype.
        hardware: Description of the machine.
        evaluated: SPPO's candidate at the run's length, for its step time.
    """
    ours = Baseline(SPPO, longest_sequence(run, hardware))
    if evaluated is not None and evaluated.shortfall is None:
        candidate = evaluated.candidate
        tokens = sum(candidate.lengths) * candidate.sequences * candidate.data_parallel_degree
        ours = replace(
            ours,
            step_s=evaluated.step_s,
            tokens_per_s_per_gpu=tokens / evaluated.step_s / candidate.num_devices,
            node_host_bytes=evaluated.node_host_bytes,
        )
    rows = [*(baseline(run, hardware, method) for method in METHODS), ours]
    claims = paper_claims(run, hardware)
    return tuple(replace(row, paper=claims.get(row.method, "")) for row in rows)


def baseline(run: RunConfig, hardware: HardwareSpec, method: Method) -> Baseline:
    """Return the longest sequence of one method, and its step at the length of `run`."""
    best = Baseline(method.name, 0)
    for degrees in method.degrees(run.model, hardware):

        def fits_there(tokens: int, degrees: Degrees = degrees) -> bool:
            candidate = method.candidate(run, hardware, degrees, tokens)
            return fits(method.fullest(candidate), hardware)

        longest = longest_tokens(fits_there)
        if longest > best.longest_tokens:
            best = replace(best, longest_tokens=longest, degrees=degrees)
    if best.degrees is None:
        return best
    too_long = best.longest_tokens + KIB
    device = method.fullest(method.candidate(run, hardware, best.degrees, too_long)).device
    on_device = device.total_bytes > hardware.device.usable_bytes
    bucket = device.largest.removesuffix("_bytes") if on_device else HOST
    return _with_fastest_step(replace(best, largest_bucket=bucket), run, hardware, method)


def _with_fastest_step(
    row: Baseline, run: RunConfig, hardware: HardwareSpec, method: Method
) -> Baseline:
    """Return `row` with the fastest step at the run's length; without one if no degrees fit."""
    length = run.sequence.length
    steps = []
    for degrees in method.degrees(run.model, hardware):
        candidate = method.candidate(run, hardware, degrees, length)
        memory = method.fullest(candidate)
        if fits(memory, hardware):
            step_s = method.step_s(candidate)
            rate = length * degrees.data_parallel / step_s / degrees.num_devices
            steps.append((rate, step_s, hardware.node.num_devices * host_bytes(memory)))
    if not steps:
        return row
    rate, step_s, node_bytes = max(steps)
    return replace(row, step_s=step_s, tokens_per_s_per_gpu=rate, node_host_bytes=node_bytes)


def paper_claims(run: RunConfig, hardware: HardwareSpec) -> dict[str, str]:
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
