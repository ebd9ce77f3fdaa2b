"""Numbers of forwards begun before each backward, between the least and the most possible."""

from itertools import accumulate, chain

import numpy as np

from sppo.schedule.actions import Op
from sppo.schedule.orders.rank_orders import encoded_orders


def least_forwards(lengths):
    """Before each backward the forwards up to the last one of its sequence."""
    ends = accumulate(map(len, lengths))
    return tuple(
        chain.from_iterable([end] * len(own) for end, own in zip(ends, lengths, strict=True))
    )


def most_forwards(name, *, num_ranks, lengths):
    """What each rank of a schedule has begun before each backward."""
    codes, _ = encoded_orders(name, num_ranks=num_ranks, lengths=lengths)
    return tuple(tuple(np.cumsum(own == Op.F)[own == Op.B].tolist()) for own in codes)


def forwards_between(name, *, num_ranks, lengths, share):
    """What each rank has begun: a share of what the schedule begins beyond what must be."""
    least = least_forwards(lengths)
    return tuple(
        tuple(one + int(share * (other - one)) for one, other in zip(least, most, strict=True))
        for most in most_forwards(name, num_ranks=num_ranks, lengths=lengths)
    )
