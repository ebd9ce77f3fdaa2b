"""Parameters gathered from sharded rows, over gloo."""

import pytest
import torch
import torch.distributed as dist

from sppo.parallel.data_parallel import rows_of
from sppo.parallel.parameter_all_gather import ParameterAllGather

SHAPES = {"matrix": (12, 5), "uneven": (7, 3), "few": (2,), "one": (1, 4), "vector": (24,)}


def whole(name):
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def own_rows(names, rank, count):
    return {n: whole(n)[rows_of(SHAPES[n][0], index=rank, count=count)].clone() for n in names}


def gathered(rank, messages):
    gather = ParameterAllGather(dist.group.WORLD, index=rank)
    under_way = [gather.begin(own_rows(names, rank, gather.count), SHAPES) for names in messages]
    found = {}
    for gathering in under_way:
        found |= gathering.finish()
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "messages", [[list(SHAPES)], [[name] for name in SHAPES], [["uneven", "one"], ["few"]]]
)
def test_whole_parameters_arrive(ranks, count, messages):
    for found in ranks.run(gathered, messages, ranks=count):
        assert sorted(found) == sorted(name for names in messages for name in names)
        for name, tensor in found.items():
            assert torch.equal(tensor, whole(name))
            assert tensor.is_contiguous()


def sizes(rank):
    gather = ParameterAllGather(dist.group.WORLD, index=rank)
    gathering = gather.begin(own_rows(["uneven", "matrix"], rank, gather.count), SHAPES)
    gathering.finish()
    shapes = {name: SHAPES[name] for name in ("uneven", "matrix")}
    return gathering.size_bytes, gather.padded_elements(shapes)


def test_what_travels_is_padded_to_equal_rows(ranks):
    expected = 4 * (2 * 3 + 3 * 5)
    assert ranks.run(sizes, ranks=4) == [(4 * expected, expected)] * 4
