"""What the ranks of a run decide together."""

import pytest

from sppo.parallel.mesh import Mesh, MeshShape
from sppo.parallel.progress import RankProgress
from sppo.train.peers import Peers
from sppo.train.ranks import Ranks, one_rank


def ranks_of(rank, count):
    mesh = Mesh(MeshShape(data_parallel=count), rank=rank, timeout_s=30.0)
    return Ranks(mesh, Peers(mesh), RankProgress.create(None), count)


def refusal(act):
    with pytest.raises(ValueError, match=".") as caught:
        act()
    return str(caught.value)


def different_schedules(rank):
    ranks = ranks_of(rank, 3)
    ranks.require_same("schedule", "the same")
    return refusal(lambda: ranks.require_same("schedule", "odd" if rank == 1 else "usual"))


def main_fails(rank):
    ranks = ranks_of(rank, 2)
    assert ranks.decided_by_main(lambda: rank + 7) == 7
    assert ranks.decided_by_main(lambda: None) is None

    def fail():
        raise ValueError("no such directory")

    return refusal(lambda: ranks.decided_by_main(fail))


def figures(rank):
    peers = ranks_of(rank, 3).peers
    return (
        peers.total([rank, 0.5]),
        peers.largest([-rank, rank]),
        peers.any(rank == 2),
        peers.any(False),
        peers.everyones(f"rank {rank}"),
    )


def test_a_schedule_of_one_rank_alone_is_refused_by_all(ranks):
    for told in ranks.run(different_schedules, ranks=3):
        assert told.startswith("ranks 1 have made another schedule than rank 0")


def test_what_rank_0_raises_is_raised_by_all(ranks):
    assert ranks.run(main_fails, ranks=2) == ["no such directory"] * 2


def test_figures_are_the_same_on_every_rank(ranks):
    expected = ([3.0, 1.5], [0.0, 2.0], True, False, ["rank 0", "rank 1", "rank 2"])
    assert ranks.run(figures, ranks=3) == [expected] * 3


def test_a_rank_that_is_alone_asks_itself():
    ranks = one_rank()
    ranks.require_same("schedule", "any")
    assert ranks.decided_by_main(lambda: 3) == 3
    assert ranks.peers.total([2.0]) == [2.0]
    assert ranks.peers.everyones("me") == ["me"]
    with pytest.raises(ValueError, match="no"):
        ranks.decided_by_main(lambda: int("no"))
