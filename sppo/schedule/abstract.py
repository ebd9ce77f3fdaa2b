"""Schedules without a model: costs in arbitrary units, as in papers and in tests.

One forward of one subsequence on one stage takes `forward`, by default 1; "second" then means the
time of that forward, and "byte" the activations that one subsequence leaves on one stage. With
interleaving, the costs are those of one of the rank's stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from sppo.config.base import Section, comma_list
from sppo.config.run import ScheduleName
from sppo.schedule.actions import Lengths
from sppo.schedule.costs import CopyEngines, Costs, Link, Links, abstract_costs, per_unit
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES, schedule_names
from sppo.schedule.program import generate, lower
from sppo.schedule.schedule import Schedule

# About four times a step of 1024 ranks and 512 subsequences; each takes about a kilobyte.
_MOST_FORWARDS = 2_000_000
_MOST_COUNT = 1_000_000
_LARGEST_COST = 1e30
"""Largest accepted cost. Above it, smaller costs that are added vanish in rounding."""
_OFFLOADED = ("none", "full", "adaptive")


def _ratios(value: object) -> object:
    """Return a word as it is, and numbers as a tuple."""
    if value in _OFFLOADED:
        return value
    try:
        ratios = tuple(map(float, comma_list(value)))
    except (TypeError, ValueError, OverflowError):
        ratios = ()
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise ValueError(
            f"neither {', '.join(_OFFLOADED)} nor numbers within 0 and 1 with commas between them"
        )
    return ratios


Count = Annotated[int, Field(ge=1, le=_MOST_COUNT)]
Cost = Annotated[float, Field(ge=0, le=_LARGEST_COST)]
CostPerSubsequence = Annotated[tuple[Cost, ...], BeforeValidator(comma_list), Field(min_length=1)]
Ratios = Annotated[
    Literal["none", "full", "adaptive"] | tuple[float, ...], BeforeValidator(_ratios)
]


class AbstractCosts(Section):
    """Times and sizes of the actions of a program, in units that the user chooses."""

    forward: Cost = 1.0
    """Time of one F on one stage."""
    backward: Cost = 2.0
    """Time of one B, without W."""
    weight: Cost = 0.0
    """Time of one W; part of B in schedules without W."""
    unit_costs: CostPerSubsequence = (1.0,)
    """Factor on all three times, one for all subsequences or one for each: 1,2,1."""
    unit_sizes: CostPerSubsequence = (1.0,)
    """Units of memory that a subsequence leaves on the device, one for all or one for each."""
    latency: Cost = 0.0
    """Time until an empty message has arrived."""
    bandwidth: Literal["unlimited"] | Annotated[float, Field(gt=0, le=_LARGEST_COST)] = "unlimited"
    """Units of memory per time over a link."""
    message_size: Cost = 0.0
    """Units of memory of a message."""
    weight_size: Cost = 0.0
    """Units of memory of a stage's weights, which MSP sends; gradients count twice that."""
    kv_size: Cost = 0.0
    """Units of memory of a unit's K/V; dK/dV count twice that."""
    offload_ratio: Ratios = "none"
    """Fraction of each subsequence that leaves the device: none, full, adaptive, or numbers, one
    for all or one for each. adaptive: as much of each subsequence but the last, whose backward
    follows at once, as its own forward hides (the paper's alpha_i * A_i = bandwidth * T_c)."""
    d2h: Cost = 1.0
    """Time to copy one unit of memory to the host."""
    h2d: Cost = 1.0
    """Time to copy one unit of memory back."""


class AbstractCase(AbstractCosts):
    """Schedule and shape of a step, and its costs."""

    schedule: Annotated[ScheduleName, Field(description=f"One of {', '.join(schedule_names())}.")]
    ranks: Count
    """Pipeline ranks."""
    sequences: Count
    """Sequences of the step."""
    subsequences: Count
    """Subsequences of each sequence."""
    virtual: Count = 1
    """Stages per rank."""
    forward_only_stages: Annotated[int, Field(ge=0, le=_MOST_COUNT)] = 0
    """First stages without a backward, because nothing trains in them or below them."""

    @model_validator(mode="after")
    def _fits_a_simulation(self) -> AbstractCase:
        if self.num_stages * self.sequences * self.subsequences > _MOST_FORWARDS:
            raise ValueError(
                f"{self.num_stages} stages x {self.sequences} sequences x {self.subsequences} "
                f"subsequences: at most {_MOST_FORWARDS:,} forwards fit a simulation; take fewer"
            )
        return self

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.virtual

    @property
    def lengths(self) -> Lengths:
        """Nominal tokens of every subsequence: enough for MSP to cut a unit over all ranks."""
        return ((self.ranks,) * self.subsequences,) * self.sequences


def abstract_case(request: AbstractCase) -> tuple[Schedule, Costs]:
    """Return the lowered schedule of `request` and its costs.

    Args:
        request: Schedule, shape and costs.

    Raises:
        ValueError: A request that cannot be served; the message names the value, the rule and what
            to change.
    """
    costs = case_costs(request, num_stages=request.num_stages, lengths=request.lengths)
    schedule = generate(
        request.schedule,
        num_ranks=request.ranks,
        num_virtual=request.virtual,
        lengths=request.lengths,
        forward_only_stages=request.forward_only_stages,
        costs=costs,
    )
    return lower(schedule, costs=costs), costs


def compared_case(request: AbstractCase, *, name: str) -> tuple[Schedule, Costs]:
    """Return the work of `request` under the schedule `name`.

    A schedule of whole sequences gets each sequence merged into one subsequence, not offloaded; a
    schedule without interleaving gets all stages of a rank merged into one, which has a backward
    if one of them has. Merged costs may exceed the largest that a request accepts.
    """
    count, stages, merged = 1, 1, dict[str, Any](schedule=name)
    if name in WHOLE_SEQUENCES and request.subsequences > 1:
        count = request.subsequences
        for key in ("unit_costs", "unit_sizes"):
            what = key.replace("_", " ")
            values = per_unit(what, getattr(request, key), num_units=count)
            merged[key] = (float(sum(values)),)
        merged |= {"subsequences": 1, "offload_ratio": "none"}
    if request.virtual > 1 and name not in WITH_VIRTUAL_STAGES:
        stages = request.virtual
        sizes = merged.get("unit_sizes", request.unit_sizes)
        merged |= {"virtual": 1, "unit_sizes": tuple(size * stages for size in sizes)}
        merged["forward_only_stages"] = request.forward_only_stages // stages
    for key in ("forward", "backward", "weight", "weight_size"):
        merged[key] = getattr(request, key) * stages
    merged["message_size"] = request.message_size * count
    merged["kv_size"] = request.kv_size * count * stages
    return abstract_case(request.model_copy(update=merged))


def case_costs(given: AbstractCosts, *, num_stages: int, lengths: Sequence[Sequence[int]]) -> Costs:
    """Return the given costs for `num_stages` stages and sequences of the given lengths.

    Raises:
        ValueError: Another number of values than units.
    """
    counts = [len(parts) for parts in lengths]
    shape = num_stages, sum(counts)
    bytes_per_s = math.inf if given.bandwidth == "unlimited" else given.bandwidth
    costs = abstract_costs(
        num_stages,
        num_units=sum(counts),
        forward_s=given.forward,
        backward_s=given.backward,
        weight_s=given.weight,
        unit_factors=given.unit_costs,
        activation_bytes=given.unit_sizes,
        links=Links(Link(given.latency, bytes_per_s)),
    )
    # Rates of copies, in bytes per second; a copy of no time has an unlimited one.
    d2h, h2d = (1 / seconds if seconds else math.inf for seconds in (given.d2h, given.h2d))
    ratios = np.zeros(shape)
    if given.offload_ratio == "full":
        ratios += 1.0
    elif given.offload_ratio == "adaptive":
        # The paper's section 5.2: the bytes whose copy overlaps one subsequence's compute.
        size = np.maximum(costs.activation_bytes, np.finfo(float).tiny)
        ratios = np.minimum(1.0, costs.forward_s * d2h / size)
        ratios[:, np.cumsum(counts) - 1] = 0.0
    elif isinstance(given.offload_ratio, tuple):
        ratios += per_unit("offload ratios", given.offload_ratio, num_units=sum(counts))
    return replace(
        costs,
        message_bytes=np.full(sum(counts), given.message_size),
        offload_bytes=costs.activation_bytes * ratios,
        kv_bytes=np.full(shape, given.kv_size),
        kv_gradient_bytes=np.full(shape, 2 * given.kv_size),
        weight_bytes=np.full(num_stages, given.weight_size),
        weight_gradient_bytes=np.full(num_stages, 2 * given.weight_size),
        copies=CopyEngines(d2h, h2d),
    )
