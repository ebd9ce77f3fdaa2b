"""Rows that travel for ZeRO-2 and 3: padded to equal rows of every rank.

Random trainings test the sums and the gathered weights, also with fewer rows than ranks.
"""

import torch
import torch.distributed as dist

from sppo.parallel.row_layout import RowLayout, rows_of
from sppo.parallel.shard_messages import GradientMessage, ParameterMessage

SHAPES = {"uneven": (7, 3), "matrix": (12, 5)}
ELEMENTS = 4 * (2 * 3 + 3 * 5)
"""Of both on four ranks."""


def gathered(rank):
    """(bytes, elements) of both parameters, and whether they arrive whole."""
    whole = {
        name: torch.arange(rows * width).view(rows, width).float()
        for name, (rows, width) in SHAPES.items()
    }
    rows = {n: w[rows_of(len(w), index=rank, count=4)].clone() for n, w in whole.items()}
    gathering = ParameterMessage(dist.group.WORLD, rows, SHAPES)
    found = gathering.finish()
    arrived = all(torch.equal(found[name], whole[name]) for name in SHAPES)
    return gathering.size_bytes, 4 * RowLayout.of(SHAPES, ranks=4).elements, arrived


def test_what_is_gathered(ranks):
    assert ranks.run(gathered, ranks=4) == [(4 * ELEMENTS, ELEMENTS, True)] * 4


def reduced(_rank):
    """(bytes, is copied) of a message of both gradients and of one alone."""
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    together, alone = (
        GradientMessage(dist.group.WORLD, {name: SHAPES[name] for name in names}, **kind)
        for names in (SHAPES, ["uneven"])
    )
    return together.size_bytes, together.is_copied, alone.size_bytes, alone.is_copied


def test_what_is_reduced(ranks):
    expected = (8 * ELEMENTS, True, 8 * 4 * 2 * 3, False)
    assert ranks.run(reduced, ranks=4) == [expected] * 4
