"""The communicators of every rank: over what they talk, and that their order cannot block."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from sppo.parallel import mesh as mesh_module
from sppo.parallel.mesh import Mesh, MeshShape
from sppo.parallel.pipeline_p2p import PipelineLinks

GPU = torch.device("cuda", 3)
waits: dict[str, float] = {}
"""Timeouts by the purpose of a group."""


@pytest.fixture
def groups(monkeypatch):
    """What every rank asks torch for, by rank: (members, purpose, backend, device)."""
    asked = defaultdict(list)
    waits.clear()
    here = []

    def new_group(ranks, *, backend, group_desc, device_id, use_local_synchronization, timeout):
        assert use_local_synchronization
        asked[here[0]].append((tuple(ranks), group_desc, backend, device_id))
        waits[group_desc] = timeout.total_seconds()
        return (tuple(ranks), group_desc)

    monkeypatch.setattr(mesh_module.dist, "new_group", new_group)

    def make(shape, *, device=None, **options):
        meshes = []
        for rank in range(shape.num_ranks):
            here[:] = [rank]
            mesh = Mesh(shape, rank=rank, timeout_s=1.0, device=device)
            meshes.append(mesh.connect(**options))
        return meshes, asked

    return make


def in_rendezvous(lists):
    """Whether ranks that do what their lists say, each in order and only together, all end."""
    left = {rank: [*items] for rank, items in enumerate(lists)}
    while any(left.values()):
        heads = defaultdict(set)
        for rank, items in left.items():
            if items:
                heads[items[0]].add(rank)
        ready = [what for what, ranks in heads.items() if ranks == {*what[0]}]
        if not ready:
            return False
        for what in ready:
            for rank in what[0]:
                left[rank].pop(0)
    return True


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 3, 2)], ids=str)
def test_tensors_travel_over_nccl_and_words_over_gloo(groups, shape):
    _, asked = groups(MeshShape(*shape), device=GPU)
    for asked_here in asked.values():
        for members, purpose, backend, device in asked_here:
            if purpose == "world" or len(members) == 1:
                assert (backend, device) == ("gloo", None)
            else:
                assert (backend, device) == ("nccl", GPU)


@pytest.mark.parametrize("world_size", [1, 6, 24])
def test_a_world_that_is_not_the_grid_is_refused(world_size):
    with pytest.raises(ValueError, match=f"makes 12 ranks, and {world_size} were started"):
        MeshShape(2, 3, 2).check(world_size)
    MeshShape(2, 3, 2).check(12)


def test_on_cpus_nothing_is_bound_to_a_device(groups):
    _, asked = groups(MeshShape(2, 2, 2))
    assert {(b, d) for of in asked.values() for m, _, b, d in of if len(m) > 1} == {
        ("gloo", None),  # everyone
        (None, None),  # the default group's
    }


def test_what_devices_do_may_take_longer_than_what_hosts_say(groups):
    groups(MeshShape(2, 3, 2), device=GPU, timeout_s=7.0, ties_ends=True, cuts_units=True)
    assert waits.pop("world") == 1.0
    assert {*waits.values()} == {7.0}


@pytest.mark.parametrize("ties_ends", [False, True])
@pytest.mark.parametrize("cuts_units", [False, True])
def test_no_communicators_that_nobody_needs(groups, cuts_units, ties_ends):
    meshes, asked = groups(
        MeshShape(1, 4, 1), device=GPU, cuts_units=cuts_units, ties_ends=ties_ends
    )
    purposes = {purpose for of in asked.values() for _, purpose, *_ in of}
    assert ("pipeline" in purposes) == cuts_units == (meshes[1].groups.pipeline is not None)
    assert ("ends" in purposes) == ties_ends == (meshes[0].groups.ends is not None)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("shape", [(1, p, 1) for p in range(2, 8)] + [(2, 3, 2), (2, 4, 1)])
def test_communicators_are_made_in_an_order_that_ends(groups, shape, wraps):
    """NCCL makes one when all its members are there, and each blocks until then."""
    _, asked = groups(MeshShape(*shape), wraps=wraps, cuts_units=True, ties_ends=True, device=GPU)
    lists = [[a[:2] for a in asked[rank] if len(a[0]) > 1] for rank in sorted(asked)]
    assert in_rendezvous(lists)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("size", range(2, 9))
def test_first_messages_may_each_wait_for_the_other_end(groups, monkeypatch, size, wraps):
    """A rank greets edge by edge; a send over NCCL may last until the receive is posted."""
    meshes, _ = groups(MeshShape(1, size, 1), wraps=wraps, device=GPU)
    greeted = []

    def send(self, tensor, *, receiver, what):
        greeted[-1].append(((self._here, receiver), "message"))

    def receive(self, shape, *, dtype, sender, what):
        greeted[-1].append(((sender, self._here), "message"))
        return _Here()

    monkeypatch.setattr(PipelineLinks, "send", send)
    monkeypatch.setattr(PipelineLinks, "receive", receive)
    for mesh in meshes:
        greeted.append([])
        PipelineLinks(mesh, device=torch.device("cpu"))
    assert in_rendezvous(greeted)
    edges = {edge for items in greeted for edge, _ in items}
    forward = {*pairwise(range(size))}
    wrapping = {(size - 1, 0), (0, size - 1)} if wraps else set()
    assert edges == forward | {(b, a) for a, b in forward} | wrapping


class _Here:
    def wait(self):
        """The message is there."""
