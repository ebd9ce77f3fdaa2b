"""Units cut into shards (MSP): ranks of the shards, and messages between them.

A unit that multiplexed sequence partitioning cuts on a stage is run by an *MSP group*: one shard
per rank, all at the same time, because in every layer each shard needs the K/V of the shards before
it. The rank that owns the stage streams the weights to the borrowers while they compute.

Messages between stages: the producer's shards and the consumer's shards cut the same tokens at
different places. Message k is the k-th interval of both cuts laid over each other. It goes from the
rank of the producer's shard to the rank of the consumer's shard, and is absent if these are the
same rank. A unit that is whole on both sides has the single message 0 of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Route:
    """Message of a unit between two stages: sender, receiver, and the token range [begin, end)."""

    sender: int
    receiver: int
    begin: int
    end: int
    tokens: int
    """Number of tokens of the whole unit."""

    @property
    def share(self) -> float:
        """Fraction of the unit's tokens that the message carries."""
        return (self.end - self.begin) / self.tokens

    def reversed(self) -> Route:
        """Return the route in the other direction."""
        return replace(self, sender=self.receiver, receiver=self.sender)


@dataclass(frozen=True, slots=True)
class MspGroup:
    """Unit on a stage that is run in shards: `ranks[k]` runs shard k of `lengths[k]` tokens."""

    ranks: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def holders(self) -> tuple[tuple[int, int], ...]:
        """Rank and tokens of each shard."""
        return tuple(zip(self.ranks, self.lengths, strict=True))


def msp_ranges(groups: Mapping[int, MspGroup]) -> list[tuple[int, int]]:
    """Return the distinct ranges (first, last) of ranks of MSP groups, in order."""
    return sorted({(group.ranks[0], group.ranks[-1]) for group in groups.values()})


def equal_shards(tokens: int, *, num_shards: int) -> tuple[int, ...]:
    """Split `tokens` into `num_shards` parts that differ by at most one, the longer ones first."""
    part, larger = divmod(tokens, num_shards)
    return tuple(part + (shard < larger) for shard in range(num_shards))


def balanced_shards(
    tokens: int, *, num_shards: int, start: int, context_slope: float
) -> tuple[int, ...]:
    """Split `tokens` into parts of equal compute; later tokens of a causal span cost more.

    A token at position x costs 1 + context_slope * x, so the span [0, x) costs
    x + context_slope * x^2 / 2 and each boundary is the root of a quadratic; boundaries are
    rounded, not lengths.

    Args:
        tokens: Tokens of the unit, at least `num_shards`.
        num_shards: Number of parts, each of at least one token.
        start: Position of the unit's first token in its sequence.
        context_slope: Growth of a token's compute per token before it.
    """
    if context_slope == 0:
        return equal_shards(tokens, num_shards=num_shards)
    base = 1 + context_slope * start
    total = base * tokens + context_slope * tokens**2 / 2
    boundaries = [0]
    for shard in range(1, num_shards):
        target = total * shard / num_shards
        # This form of the root loses no digits when the slope is tiny.
        root = 2 * target / (base + (base**2 + 2 * context_slope * target) ** 0.5)
        lowest, highest = boundaries[-1] + 1, tokens - (num_shards - shard)
        boundaries.append(min(max(round(root), lowest), highest))
    boundaries.append(tokens)
    return tuple(end - begin for begin, end in zip(boundaries, boundaries[1:], strict=False))


def routes_between(
    producer: Sequence[tuple[int, int]], consumer: Sequence[tuple[int, int]]
) -> tuple[Route, ...]:
    """Return the messages between two cuts of the same tokens, each (rank, tokens) per shard."""
    ends_out = list(accumulate(tokens for _, tokens in producer))
    ends_in = list(accumulate(tokens for _, tokens in consumer))
    assert ends_out[-1] == ends_in[-1], f"cuts of {ends_out[-1]} and {ends_in[-1]} tokens"
    routes, begin, out, into = [], 0, 0, 0
    while begin < ends_out[-1]:
        end = min(ends_out[out], ends_in[into])
        routes.append(Route(producer[out][0], consumer[into][0], begin, end, ends_out[-1]))
        begin = end
        out += ends_out[out] == end
        into += ends_in[into] == end
    return tuple(routes)
