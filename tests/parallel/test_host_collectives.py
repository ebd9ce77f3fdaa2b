"""What ranks decide and do together ends the same way on all of them."""

import pytest

from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import MeshShape


def ranks_of(rank, count):
    mesh = Mesh(MeshShape(data_parallel=count), rank=rank, timeout_s=30.0)
    return HostCollectives(mesh.groups.world)


def refusal(act):
    with pytest.raises(ValueError, match=".") as caught:
        act()
    return str(caught.value)


def different_schedules(rank):
    ranks = ranks_of(rank, 3)
    ranks.check_same_result("schedule", "the same")
    return refusal(lambda: ranks.check_same_result("schedule", "odd" if rank == 1 else "usual"))


def main_fails(rank):
    ranks = ranks_of(rank, 2)
    assert ranks.decided_by_main(lambda: rank + 7) == 7
    assert ranks.decided_by_main(lambda: None) is None

    def fail():
        raise ValueError("no such directory")

    return refusal(lambda: ranks.decided_by_main(fail))


def one_fails(rank):
    ranks = ranks_of(rank, 3)
    assert ranks.done_by_all(lambda: rank) == rank

    def fail_on_rank_1():
        if rank == 1:
            raise ValueError("no such directory")

    return refusal(lambda: ranks.done_by_all(fail_on_rank_1))


def test_a_schedule_of_one_rank_alone_is_refused_by_all(ranks):
    for told in ranks.run(different_schedules, ranks=3):
        assert told.startswith("rank 1 has made another schedule than rank 0")


def test_what_rank_0_raises_is_raised_by_all(ranks):
    assert ranks.run(main_fails, ranks=2) == ["no such directory"] * 2


def test_what_one_rank_raises_is_raised_by_all_with_its_number(ranks):
    assert ranks.run(one_fails, ranks=3) == ["rank 1: no such directory"] * 3
