"""Whole gradients of every rank, summed into sharded rows over gloo."""

import pytest
import torch
import torch.distributed as dist

from sppo.parallel.data_parallel import rows_of
from sppo.parallel.gradient_reduce_scatter import GradientReduceScatter

SHAPES = {"matrix": (12, 5), "uneven": (7, 3), "few": (2,), "one": (1, 4), "vector": (24,)}


def formed(name, rank):
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def messages_of(scatter, messages):
    return [
        scatter.zeros(
            {name: SHAPES[name] for name in names},
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        for names in messages
    ]


def reduced(rank, messages):
    """This rank's rows after two uses of all parameters, the second behind the first."""
    scatter = GradientReduceScatter(dist.group.WORLD, index=rank)
    shards = {
        name: torch.zeros_like(formed(name, 0)[rows_of(rows, index=rank, count=scatter.count)])
        for name, (rows, *_) in SHAPES.items()
    }
    under_way = []
    for use in (1, 2):
        for message in messages_of(scatter, messages):
            for name, whole in message.whole.items():
                assert whole.is_contiguous()
                whole.add_(use * formed(name, rank))
            message.reduce()
            under_way.append(message)
    for message in under_way:
        message.add_to(shards)
    return shards


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "messages", [[list(SHAPES)], [[name] for name in SHAPES], [["uneven", "one"], ["few"]]]
)
def test_every_rank_has_its_rows_of_the_sums(ranks, count, messages):
    answers = ranks.run(reduced, messages, ranks=count)
    for name in (name for names in messages for name in names):
        expected = 3 * sum(formed(name, rank) for rank in range(count))
        torch.testing.assert_close(torch.cat([shards[name] for shards in answers]), expected)


def sizes(rank):
    scatter = GradientReduceScatter(dist.group.WORLD, index=rank)
    together, alone = messages_of(scatter, [["uneven", "matrix"], ["uneven"]])
    shapes = {name: SHAPES[name] for name in ("uneven", "matrix")}
    found = together.size_bytes, together.is_copied, alone.size_bytes, alone.is_copied
    return *found, scatter.padded_elements(shapes)


def test_what_travels_is_padded_to_equal_rows(ranks):
    elements = 4 * (2 * 3 + 3 * 5)
    expected = (8 * elements, True, 8 * 4 * 2 * 3, False, elements)
    assert ranks.run(sizes, ranks=4) == [expected] * 4
