"""Costs of a schedule's actions: seconds and bytes per stage and unit, and rates of links.

The tables are plain numpy arrays of shape [num_stages, num_units], with units numbered over all
sequences. The planner fills the tables from its cost model; `abstract_costs` fills them with
numbers from the command line, where "second" and "byte" may stand for any unit of time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
"""Values of stages and units, [num_stages, num_units]."""
StageTable = Table
"""Values of stages, [num_stages]."""
UnitTable = Table
"""Values of units, [num_units]."""


@dataclass(frozen=True, slots=True)
class Link:
    """Link from one rank to another, in one direction.

    A message occupies the link for bytes / bandwidth and arrives `latency_s` after that.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Links:
    """Links between ranks: one default for all pairs, and exceptions for directed pairs.

    Attributes:
        default: Link of every pair without an entry in `between`.
        between: Links of directed pairs, by (sender, receiver).
        most_ranges: Largest number of ranges of ranks in which one rank may share units (MSP);
            each range needs communicators.
    """

    default: Link = Link()
    between: Mapping[tuple[int, int], Link] = field(default_factory=lambda: MappingProxyType({}))
    most_ranges: float = math.inf

    def link(self, sender: int, *, receiver: int) -> Link:
        """Return the link from `sender` to `receiver`."""
        return self.between.get((sender, receiver), self.default)


@dataclass(frozen=True, slots=True)
class CopyEngines:
    """Bandwidth of a rank's copies to and from one tier, with both directions busy."""

    d2h_bytes_per_s: float = math.inf
    h2d_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LayerCopies:
    """Flow of the copies of one stage's units in blocks of one layer each.

    Attributes:
        layers: Layers of the stage, taken as equal.
        out: Number of blocks that may be in flight to the next tier when compute ends the next
            layer.
        back: Number of blocks that come back ahead of the layer in use.
    """

    layers: int
    out: int
    back: int


class SeenKV(NamedTuple):
    """Bytes of K and V up to each unit that its queries see, and of their gradients."""

    kv_bytes: Table
    """K and V of layers with a backward, the unit's own included, [num_stages, num_units]."""
    passing_kv_bytes: Table
    """K and V of layers without a backward."""
    gradient_bytes: Table
    """Gradients of `kv_bytes`."""

    def at(self, index: Any) -> SeenKV:
        """Return some of the entries of all tables."""
        return SeenKV(*(table[index] for table in self))


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Costs of every action of a schedule.

    Attributes:
        forward_s: Seconds of F of (stage, unit).
        backward_s: Seconds of B of (stage, unit) if a W computes the weight half; without a W, B
            takes backward_s + weight_s.
        weight_s: Seconds of W of (stage, unit).
        reduce_s: Seconds of REDUCE of each stage [num_stages]; compute of its rank waits for it.
        last_reduction_wait_s: Seconds that compute of a rank waits if gradients of a stage leave
            before their REDUCE: the last of the reductions after each use, [num_stages].
        message_bytes: Bytes of one activation or gradient between stages [num_units].
        activation_bytes: Bytes that F of (stage, unit) saves for its backward, without K/V; with
            states of linear attention.
        offload_bytes: Part of activation_bytes that a D2H copies out and an H2D brings back.
        kv_offload_bytes: Bytes of K and V that a D2H copies out and an H2D brings back; 0 where K
            and V are not offloaded between F and B.
        kv_recompute_s: Seconds of KV of (stage, unit); 0 where K and V are retained or copied.
        streamed_weight_bytes: Bytes that an H2D of a stage's weights copies [num_stages]; 0 where
            weights stay on the device.
        streamed_gradient_bytes: Bytes that a D2H of a stage's gradients copies out and an H2D
            brings back [num_stages]; 0 where gradients stay on the device.
        operand_bytes: Bytes that B of (stage, unit) keeps for W, if a W computes the weight half.
        kv_bytes: K/V of (stage, unit), kept from F to B and read by all later subsequences.
        passing_kv_bytes: K/V of layers of (stage, unit) without a backward, which `kv_bytes` leaves
            out: kept to the last F of the sequence.
        kv_gradient_bytes: dK/dV of (stage, unit), live during a whole sequence's backward.
        seen_kv: K and V that queries of (stage, unit) see, which MSP sends; None if they see those
            of all units before.
        weight_bytes: Weights of a stage, which MSP sends to borrower ranks [num_stages].
        weight_gradient_bytes: Weight gradients, which borrowers send back [num_stages].
        context_slope: Growth of a token's compute per token before it, relative to the first
            token's compute; it balances the shards of an MSP unit. 0 means all tokens are equal.
        links: Links that carry messages between ranks.
        copies: Copy engines of D2H and H2D.
        state_copies: Copy engines of weights and gradients, if their tier differs from that of
            the other tensors; None if all copies share one queue per direction.
        layer_copies: Flow of copies on each stage; () if units are copied as a whole and copies
            may lag without limit.
        unit_collectives_s: Seconds of the collectives that go with every F and with every B, per
            stage, which take as long if a unit is cut (MSP); () for none.
    """

    forward_s: Table
    backward_s: Table
    weight_s: Table
    reduce_s: StageTable
    last_reduction_wait_s: StageTable
    message_bytes: UnitTable
    activation_bytes: Table
    offload_bytes: Table
    kv_offload_bytes: Table
    kv_recompute_s: Table
    operand_bytes: Table
    kv_bytes: Table
    passing_kv_bytes: Table
    kv_gradient_bytes: Table
    weight_bytes: StageTable
    weight_gradient_bytes: StageTable
    streamed_weight_bytes: StageTable
    streamed_gradient_bytes: StageTable
    context_slope: float = 0.0
    links: Links = Links()
    copies: CopyEngines = CopyEngines()
    state_copies: CopyEngines | None = None
    layer_copies: tuple[LayerCopies, ...] = ()
    unit_collectives_s: tuple[tuple[float, float], ...] = ()
    seen_kv: SeenKV | None = None

    def __post_init__(self) -> None:
        stages, units = self.forward_s.shape
        shapes = {
            **dict.fromkeys(_STAGE_UNIT_TABLES, (stages, units)),
            **dict.fromkeys(_STAGE_TABLES, (stages,)),
            "message_bytes": (units,),
        }
        for name, shape in shapes.items():
            table = getattr(self, name)
            if table.shape != shape:
                raise ValueError(f"costs.{name} has shape {table.shape}: must be {shape}")
            if not (table.min(initial=0.0) >= 0 and table.max(initial=0.0) < math.inf):
                raise ValueError(f"costs.{name} holds a negative or infinite value")
        if (self.offload_bytes > self.activation_bytes).any():
            raise ValueError(
                "offload_bytes exceeds activation_bytes somewhere: a unit cannot move more than "
                "it holds; an offload ratio is at most 1"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages of the tables."""
        return int(self.forward_s.shape[0])

    @property
    def num_units(self) -> int:
        """Number of units of the tables."""
        return int(self.forward_s.shape[1])

    def of_first_units(self, count: int) -> Costs:
        """Return the costs of the first `count` units alone."""
        tables = {name: getattr(self, name)[:, :count] for name in _STAGE_UNIT_TABLES}
        seen = self.seen_kv and self.seen_kv.at((slice(None), slice(count)))
        return replace(self, message_bytes=self.message_bytes[:count], seen_kv=seen, **tables)

    def of_stages(self, stages: Sequence[int]) -> Costs:
        """Return the costs of `stages` alone."""
        tables = {name: getattr(self, name)[[*stages]] for name in _STAGE_UNIT_TABLES}
        tables |= {name: getattr(self, name)[[*stages]] for name in _STAGE_TABLES}
        return replace(
            self,
            **tables,
            seen_kv=self.seen_kv and self.seen_kv.at([*stages]),
            layer_copies=tuple(self.layer_copies[s] for s in stages if self.layer_copies),
            unit_collectives_s=tuple(
                self.unit_collectives_s[s] for s in stages if self.unit_collectives_s
            ),
        )

    def repeats(self, count: int) -> bool:
        """Return whether the costs of the first `count` units repeat over all units."""
        tables = [getattr(self, name) for name in _STAGE_UNIT_TABLES]
        return all(
            bool((table[..., count:] == table[..., :-count]).all())
            for table in (*tables, self.message_bytes)
        )


_STAGE_UNIT_TABLES = tuple(each.name for each in fields(Costs) if each.type == "Table")
_STAGE_TABLES = tuple(each.name for each in fields(Costs) if each.type == "StageTable")


def abstract_costs(
    num_stages: int,
    *,
    num_units: int,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_s: float = 0.0,
    unit_factors: Sequence[float] | None = None,
    activation_bytes: Sequence[float] | float = 1.0,
    links: Links | None = None,
) -> Costs:
    """Return costs that need no model: the same for every stage.

    Args:
        num_stages: Stages of the pipeline.
        num_units: Units of the step, all sequences together.
        forward_s: Seconds of F of a unit.
        backward_s: Seconds of B of a unit, without its weight half.
        weight_s: Seconds of the weight half.
        unit_factors: Factors on all three times for each unit in turn, repeated over the sequences.
        activation_bytes: Bytes that a unit leaves on the device, for all or for each unit in turn.
        links: Links that carry messages; free if not given.

    Raises:
        ValueError: A negative cost, or per-unit values that do not fit the number of units.
    """
    factors = per_unit("unit costs", unit_factors or (1.0,), num_units=num_units)
    sizes = (activation_bytes,) if isinstance(activation_bytes, int | float) else activation_bytes
    retained = per_unit("unit sizes", sizes, num_units=num_units)
    shape = (num_stages, num_units)
    tables: dict[str, Any] = dict.fromkeys(_STAGE_UNIT_TABLES, np.zeros(shape))
    tables |= dict.fromkeys(_STAGE_TABLES, np.zeros(num_stages))
    tables |= {
        "forward_s": np.broadcast_to(factors * forward_s, shape),
        "backward_s": np.broadcast_to(factors * backward_s, shape),
        "weight_s": np.broadcast_to(factors * weight_s, shape),
        "activation_bytes": np.broadcast_to(retained, shape),
        "operand_bytes": np.broadcast_to(retained, shape),
        "message_bytes": np.zeros(num_units),
    }
    return Costs(**tables, links=links or Links())


def per_unit(what: str, values: Sequence[float], *, num_units: int) -> Table:
    """Return `values` repeated until every unit has a value.

    Raises:
        ValueError: The number of units is not a multiple of the number of values; the message
            calls the values `what`.
    """
    repeats, rest = divmod(num_units, len(values))
    if rest:
        raise ValueError(
            f"{len(values)} {what} for {num_units} units: give one per subsequence, or one for all"
        )
    return np.tile(np.asarray(values, dtype=np.float64), repeats)
