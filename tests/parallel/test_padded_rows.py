"""Rows that travel for ZeRO-2 and 3: padded to equal rows of every rank.

Random trainings test the sums and the gathered weights, also with fewer rows than ranks.
"""

import torch
import torch.distributed as dist

from sppo.parallel.data_parallel import rows_of
from sppo.parallel.gradient_reduce_scatter import GradientReduceScatter
from sppo.parallel.parameter_all_gather import ParameterAllGather

SHAPES = {"uneven": (7, 3), "matrix": (12, 5)}
ELEMENTS = 4 * (2 * 3 + 3 * 5)
"""Of both on four ranks."""


def gathered(rank):
    """(bytes, elements) of both parameters, and whether they arrive whole."""
    gather = ParameterAllGather(dist.group.WORLD, index=rank)
    whole = {
        name: torch.arange(rows * width).view(rows, width).float()
        for name, (rows, width) in SHAPES.items()
    }
    rows = {n: w[rows_of(len(w), index=rank, count=4)].clone() for n, w in whole.items()}
    gathering = gather.begin(rows, SHAPES)
    found = gathering.finish()
    arrived = all(torch.equal(found[name], whole[name]) for name in SHAPES)
    return gathering.size_bytes, gather.padded_elements(SHAPES), arrived


def test_what_is_gathered(ranks):
    assert ranks.run(gathered, ranks=4) == [(4 * ELEMENTS, ELEMENTS, True)] * 4


def reduced(rank):
    """(bytes, is copied) of a message of both gradients and of one alone; elements of both."""
    scatter = GradientReduceScatter(dist.group.WORLD, index=rank)
    together, alone = (
        scatter.zeros(
            {name: SHAPES[name] for name in names}, dtype=torch.float64, device=torch.device("cpu")
        )
        for names in (SHAPES, ["uneven"])
    )
    found = together.size_bytes, together.is_copied, alone.size_bytes, alone.is_copied
    return *found, scatter.padded_elements(SHAPES)


def test_what_is_reduced(ranks):
    expected = (8 * ELEMENTS, True, 8 * 4 * 2 * 3, False, ELEMENTS)
    assert ranks.run(reduced, ranks=4) == [expected] * 4
