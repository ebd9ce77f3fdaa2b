"""Changes of a feasible request that would make it faster: sequences per step, tiers, ZeRO, nodes.

Each change is one override of the request. A changed request is priced by closed forms, and its
fastest candidate is simulated. Lower bounds rule out most changes before they are priced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.advice import without_keys
from sppo.planning.search.choices import subsequence_counts_to_try
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution, quick_best

WORTH_IT = 1.03
"""Tokens per second and device from which a change is listed, relative to the best answer."""
_LISTED = 4
_STARVED = 0.1
"""Bubble fraction from which more sequences per step are tried."""
_MOST_UNITS = 200_000
"""Stages x units up to which more sequences per step are tried."""
_LARGE = 20_000
"""Stages x units above which a change is tried with only one number of subsequences."""
_AS_FAST = 1.01
"""Step time allowed on fewer nodes, relative to the best answer."""
_NEARLY = 0.995
"""Gain from which half as many sequences per step are preferred, relative to the best gain."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """One change of a request that makes it faster.

    Attributes:
        change: Override of the run file or the machine.
        step_s: Seconds of a step after the change.
        tokens_per_s: Tokens per second of all devices after the change.
        gain: Tokens per second and device, as a multiple of the best answer's.
        device_peak_bytes: Peak memory of the fullest device after the change.
    """

    change: str
    step_s: float
    tokens_per_s: float
    gain: float
    device_peak_bytes: int


@dataclass(frozen=True, slots=True)
class _Change:
    """Request that differs from another by one override."""

    override: str
    run: RunConfig
    hardware: HardwareSpec


def improvements(solution: Solution) -> tuple[Improvement, ...]:
    """Return the changes that gain most, best first.

    Args:
        solution: Answer to a request that fits.
    """
    found = [*_more_sequences(solution), *_fewer_nodes(solution)]
    for change in _other_requests(solution):
        improvement = _improvement(solution, change)
        if improvement is not None:
            found.append(improvement)
    paying = [each for each in found if each.gain >= WORTH_IT]
    return tuple(sorted(paying, key=lambda each: -each.gain)[:_LISTED])


def _best(solution: Solution) -> EvaluatedCandidate:
    assert solution.best is not None, "only asked of what fits"
    return solution.best


def _improvement(
    solution: Solution, change: _Change, *, most_s: float = math.inf
) -> Improvement | None:
    """Return the gain of a change; None if it does not fit, or gains less than is listed.

    Args:
        solution: Answer to the request without the change.
        change: Changed request.
        most_s: Upper bound of the step time; slower steps are not wanted.
    """
    known = _best(solution)
    least = WORTH_IT * _rate(solution.run, solution.hardware, known.step_s)
    most_s = min(most_s, _tokens(change.run) / (least * change.hardware.num_devices))
    best = quick_best(change.run, change.hardware, below=most_s)
    if best is None or best.step_s > most_s:
        return None
    rate = _rate(change.run, change.hardware, best.step_s)
    return Improvement(
        change.override,
        best.step_s,
        tokens_per_s=_tokens(change.run) / best.step_s,
        gain=rate * WORTH_IT / least,
        device_peak_bytes=best.device_peak_bytes,
    )


def _tokens(run: RunConfig) -> int:
    return run.sequence.length * run.train.sequences_per_step


def _rate(run: RunConfig, hardware: HardwareSpec, step_s: float) -> float:
    """Return the tokens per second over all devices of the machine, including unused ones."""
    return _tokens(run) / step_s / hardware.num_devices


def _more_sequences(solution: Solution) -> Iterator[Improvement]:
    """Yield the gain of more sequences per step: the fewest whose gain is close to the best.

    Tried only if the bubble is large or devices are unused.
    """
    run, hardware, best = solution.run, solution.hardware, _best(solution)
    idle = best.degrees.num_devices < hardware.num_devices
    if best.simulated.bubble_fraction < _STARVED and not idle:
        return
    units = best.costs.forward_s.size // best.candidate.sequences
    most = min(hardware.num_devices, _MOST_UNITS // units)
    counts = [run.train.sequences_per_step]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    fewest, most_gain = None, 0.0
    for sequences in reversed(counts[1:]):
        train = run.train.model_copy(update={"sequences_per_step": sequences})
        override = f"train.sequences_per_step={sequences}"
        change = _Change(override, run.model_copy(update={"train": train}), hardware)
        improvement = _improvement(solution, change)
        if improvement is None or improvement.gain < _NEARLY * most_gain:
            break
        fewest, most_gain = improvement, max(most_gain, improvement.gain)
    if fewest is not None:
        yield fewest


def _other_requests(solution: Solution) -> Iterator[_Change]:
    run, hardware = solution.run, solution.hardware

    def changed(section: str, **update: object) -> _Change:
        key, value = next(iter(update.items()))
        old = getattr(run, section)
        new = run.model_copy(update={section: old.model_copy(update=update)})
        text = str(value).lower() if isinstance(value, bool) else value
        return _Change(f"{section}.{key}={text}", new, hardware)

    on_host = hardware.node.host_memory_bytes > 0 and hardware.device.kind != "cpu"
    if on_host and run.state.optimizer in ("auto", "device"):
        yield changed("state", optimizer="host")
    for level in range(run.parallel.zero + 1, 4):
        yield changed("parallel", zero=level)
    if run.parallel.schedule != "auto":
        yield changed("parallel", schedule="auto")
    if run.activations.policy not in ("auto", "hybrid"):
        yield changed("activations", policy="auto")
    if run.activations.offload_ratio != "auto":
        yield changed("activations", offload_ratio="auto")
    yield from _other_cuts(run, hardware)


def _fewer_nodes(solution: Solution) -> Iterator[Improvement]:
    """Yield the gain of fewer nodes if a step takes about as long on them."""
    hardware, best = solution.hardware, _best(solution)
    used = -(-best.degrees.num_devices // hardware.node.num_devices)
    nodes = used if used < hardware.num_nodes else hardware.num_nodes // 2
    if nodes == 0:
        return
    change = _Change(f"hardware.nodes={nodes}", solution.run, replace(hardware, num_nodes=nodes))
    improvement = _improvement(solution, change, most_s=best.step_s * _AS_FAST)
    if improvement is not None:
        yield improvement


def _other_cuts(run: RunConfig, hardware: HardwareSpec) -> Iterator[_Change]:
    """Yield changes to other numbers of subsequences if the request fixes one."""
    fixed = run.sequence.num_subsequences != "auto" or run.sequence.boundaries is not None
    if not fixed:
        return
    free = without_keys(run, parallel=[], sequence=["num_subsequences", "boundaries"])
    counts = subsequence_counts_to_try(free, hardware=hardware)
    for count in counts[:: max(1, len(counts) // 4)]:
        sequence = free.sequence.model_copy(update={"num_subsequences": count})
        override = f"sequence.num_subsequences={count}"
        if run.sequence.boundaries is not None:
            override += " sequence.boundaries=null"
        yield _Change(override, run.model_copy(update={"sequence": sequence}), hardware)
