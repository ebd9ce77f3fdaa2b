"""Schedules without a model: costs in arbitrary units, as in papers and in tests.

One forward of one subsequence on one stage takes `forward_s`, by default 1; "second" then means
the time of that forward, and "byte" the activations that one subsequence leaves on one stage. With
interleaving, the costs are those of one of the rank's stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sppo.schedule.actions import Schedule
from sppo.schedule.costs import (
    CopyEngines,
    Costs,
    Link,
    Links,
    Table,
    abstract_costs,
    per_unit,
    with_offload,
)
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.schedule.program import Case, step_program

# About four times a step of 1024 ranks and 512 subsequences; each takes about a kilobyte.
_MOST_FORWARDS = 2_000_000
OffloadRatios = Literal["none", "full", "adaptive"] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AbstractOffload:
    """Offloaded fractions of the units, and the speed of the copies.

    Attributes:
        ratios: "none"; "full", all of every subsequence; "adaptive", as much of each subsequence
            as its own forward hides (the paper's alpha_i * A_i = bandwidth * T_c); or one ratio for
            all, or one per subsequence.
        d2h_s: Seconds to copy a unit of size 1 to the host.
        h2d_s: Seconds to copy a unit of size 1 back.
        keep_last: Number of last subsequences of each sequence that stay, because their backward
            follows at once; None keeps one under "adaptive" and none otherwise.
        prefetch: How many backwards ahead a unit comes back.
    """

    ratios: OffloadRatios = "none"
    d2h_s: float = 1.0
    h2d_s: float = 1.0
    keep_last: int | None = None
    prefetch: int = 1


@dataclass(frozen=True, slots=True)
class AbstractCase:
    """Schedule and costs as given by command-line flags.

    Attributes:
        schedule: Schedule name that `generate` accepts.
        num_ranks: Pipeline ranks.
        num_sequences: Sequences of the step.
        num_subsequences: Subsequences of each sequence.
        num_virtual: Stages per rank.
        warmup_per_hop: Warm-up forwards per rank towards the front (see `generate`).
        forward_s: Seconds of one forward.
        backward_s: Seconds of one backward without its weight half.
        weight_s: Seconds of the weight half.
        unit_costs: Factor on all three times for each subsequence in turn.
        unit_sizes: Bytes that a unit leaves on the device, for each subsequence in turn.
        latency_s: Latency of a message.
        bytes_per_s: Bandwidth of a link.
        message_bytes: Bytes of a message.
        weight_bytes: Bytes of a stage's weights, which MSP sends; gradients count twice that.
        kv_bytes: Bytes of a unit's K/V; dK/dV count twice that.
        offload: Offloaded fractions and the speed of copies.
    """

    schedule: str
    num_ranks: int
    num_sequences: int
    num_subsequences: int
    num_virtual: int = 1
    warmup_per_hop: int = 1
    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 0.0
    unit_costs: tuple[float, ...] = (1.0,)
    unit_sizes: tuple[float, ...] = (1.0,)
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    message_bytes: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    offload: AbstractOffload = AbstractOffload()

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_sequences", "num_subsequences", "num_virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        for name in ("forward_s", "backward_s", "weight_s", "latency_s", "message_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: must be finite, at least 0")
        stages = self.num_ranks * self.num_virtual
        if stages * self.num_sequences * self.num_subsequences > _MOST_FORWARDS:
            raise ValueError(
                f"{stages} stages x {self.num_sequences} sequences x {self.num_subsequences} "
                f"subsequences: at most {_MOST_FORWARDS:,} forwards fit a simulation; take fewer"
            )

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Nominal tokens of every subsequence: enough for MSP to cut a unit over all ranks."""
        return ((self.num_ranks,) * self.num_subsequences,) * self.num_sequences


def abstract_case(request: AbstractCase) -> Case:
    """Return the lowered schedule of `request` and its costs.

    Raises:
        ValueError: A request that cannot be served; the message names the value, the rule and what
            to change.
    """
    costs = case_costs(
        request,
        num_stages=request.num_ranks * request.num_virtual,
        lengths=request.lengths,
    )
    return Case(_program(request, costs=costs, forward_only=False), costs)


def forward_case(request: AbstractCase) -> Case:
    """Return the forward of `request` alone, as an evaluation runs it: nothing is offloaded."""
    kept = replace(request, offload=AbstractOffload())
    costs = case_costs(
        kept, num_stages=request.num_ranks * request.num_virtual, lengths=request.lengths
    )
    return Case(_program(kept, costs=costs, forward_only=True), costs)


def compared_case(request: AbstractCase, *, name: str) -> Case:
    """Return the work of `request` under the schedule `name`.

    A schedule of whole sequences gets each sequence merged into one subsequence, not offloaded; a
    schedule without interleaving gets all stages of a rank merged into one.
    """
    other = replace(request, schedule=name)
    if name in WHOLE_SEQUENCES and request.num_subsequences > 1:
        count = request.num_subsequences
        costs = per_unit("unit costs", request.unit_costs, num_units=count)
        sizes = per_unit("unit sizes", request.unit_sizes, num_units=count)
        other = replace(
            other,
            num_subsequences=1,
            unit_costs=(float(costs.sum()),),
            unit_sizes=(float(sizes.sum()),),
            message_bytes=request.message_bytes * count,
            kv_bytes=request.kv_bytes * count,
            offload=AbstractOffload(),
        )
    if request.num_virtual > 1 and name not in WITH_VIRTUAL_STAGES:
        merged = request.num_virtual
        other = replace(
            other,
            num_virtual=1,
            forward_s=request.forward_s * merged,
            backward_s=request.backward_s * merged,
            weight_s=request.weight_s * merged,
            unit_sizes=tuple(size * merged for size in other.unit_sizes),
            weight_bytes=request.weight_bytes * merged,
            kv_bytes=other.kv_bytes * merged,
        )
    return abstract_case(other)


def case_costs(
    request: AbstractCase, *, num_stages: int, lengths: Sequence[Sequence[int]]
) -> Costs:
    """Return the costs of `request` for `num_stages` stages and sequences of the given lengths."""
    counts = [len(parts) for parts in lengths]
    units = sum(counts)
    costs = abstract_costs(
        num_stages,
        num_units=units,
        forward_s=request.forward_s,
        backward_s=request.backward_s,
        weight_s=request.weight_s,
        unit_factors=request.unit_costs,
        activation_bytes=request.unit_sizes,
        links=Links(Link(request.latency_s, request.bytes_per_s)),
    )
    shape = (num_stages, units)
    costs = replace(
        costs,
        message_bytes=np.full(units, request.message_bytes),
        kv_bytes=np.full(shape, request.kv_bytes),
        kv_gradient_bytes=np.full(shape, 2 * request.kv_bytes),
        weight_bytes=np.full(num_stages, request.weight_bytes),
        weight_gradient_bytes=np.full(num_stages, 2 * request.weight_bytes),
    )
    if request.offload.ratios == "none":
        return costs
    ratios = offload_ratios(request.offload, costs=costs, counts=counts)
    return with_offload(costs, ratios=ratios, copies=_engines(request.offload))


def offload_ratios(offload: AbstractOffload, *, costs: Costs, counts: Sequence[int]) -> Table:
    """Return the fraction of each unit that leaves the device, [num_stages, num_units].

    Raises:
        ValueError: A ratio outside 0 to 1, or more subsequences to keep than a sequence has.
    """
    shape = (costs.num_stages, costs.num_units)
    keep = offload.keep_last
    if keep is None:
        keep = 1 if offload.ratios == "adaptive" else 0
    if not 0 <= keep <= min(counts):
        raise ValueError(
            f"keep-last is {keep}: must be from 0 to the {min(counts)} subsequences of a sequence"
        )
    if offload.ratios == "adaptive":
        # The paper's section 5.2: the bytes whose copy overlaps one subsequence's compute.
        hidden = costs.forward_s * _engines(offload).d2h_bytes_per_s
        size = np.maximum(costs.activation_bytes, np.finfo(float).tiny)
        ratios = np.minimum(1.0, hidden / size)
    elif isinstance(offload.ratios, tuple):
        given = per_unit("offload ratios", offload.ratios, num_units=costs.num_units)
        if given.min() < 0 or given.max() > 1:
            raise ValueError(
                f"offload ratios {', '.join(f'{r:g}' for r in offload.ratios)}: "
                "must be within 0 and 1"
            )
        ratios = np.broadcast_to(given, shape).copy()
    else:
        ratios = np.ones(shape)
    kept = np.concatenate([np.arange(count) >= count - keep for count in counts])
    ratios[:, kept] = 0.0
    return ratios


def _engines(offload: AbstractOffload) -> CopyEngines:
    if offload.d2h_s < 0 or offload.h2d_s < 0 or offload.prefetch < 1:
        raise ValueError(
            f"d2h {offload.d2h_s:g}, h2d {offload.h2d_s:g}, prefetch {offload.prefetch}: copy "
            "times must be at least 0 and units come back at least 1 backward ahead"
        )
    return CopyEngines(
        d2h_bytes_per_s=1 / offload.d2h_s if offload.d2h_s else math.inf,
        h2d_bytes_per_s=1 / offload.h2d_s if offload.h2d_s else math.inf,
    )


def _program(request: AbstractCase, *, costs: Costs, forward_only: bool) -> Schedule:
    return step_program(
        request.schedule,
        num_ranks=request.num_ranks,
        num_virtual=request.num_virtual,
        lengths=request.lengths,
        warmup_per_hop=request.warmup_per_hop,
        forward_only=forward_only,
        costs=costs,
        prefetch=request.offload.prefetch,
    )
