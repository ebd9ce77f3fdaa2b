"""Numbers of forwards begun before each backward, between the least and the most possible."""

from itertools import accumulate, chain

from sppo.schedule.orders.rank_orders import rank_orders


def least_forwards(lengths):
    """Before each backward the forwards up to the last one of its sequence."""
    ends = accumulate(map(len, lengths))
    return tuple(
        chain.from_iterable([end] * len(own) for end, own in zip(ends, lengths, strict=True))
    )


def most_forwards(name, *, num_ranks, lengths):
    """What each rank of a schedule has begun before each backward."""
    found = []
    for steps in rank_orders(name, num_ranks=num_ranks, lengths=lengths):
        counts = accumulate(kind == "F" for kind, _ in steps)
        found.append(
            tuple(count for count, (kind, _) in zip(counts, steps, strict=True) if kind == "B")
        )
    return tuple(found)


def forwards_between(name, *, num_ranks, lengths, share):
    """What each rank has begun: a share of what the schedule begins beyond what must be."""
    least = least_forwards(lengths)
    return tuple(
        tuple(one + int(share * (other - one)) for one, other in zip(least, most, strict=True))
        for most in most_forwards(name, num_ranks=num_ranks, lengths=lengths)
    )
