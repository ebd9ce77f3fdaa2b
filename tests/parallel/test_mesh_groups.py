"""Communicators of every rank: their transport, and an order that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.communicators import CommunicatorUse
from sppo.cost.layer import Workload
from sppo.cost.stages.links import pipeline_links
from sppo.hardware.presets import PRESETS
from sppo.parallel import mesh as mesh_module
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import Coordinates, MeshShape, check_streams, count_streams

GPU = torch.device("cuda", 3)
waits: dict[str, float] = {}
"""Timeouts by the purpose of a group."""
overlap_options: dict[int, list[Any]] = defaultdict(list)
"""By rank, the options of the communicators of NCCL that it makes; None where they are torch's."""


class Options:
    """As those of ``ProcessGroupNCCL``, which a build for CPUs does not have."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=32)


@pytest.fixture
def groups(monkeypatch):
    """What every rank asks torch for, by rank: (members, purpose, backend, device)."""
    asked = defaultdict(list)
    waits.clear()
    overlap_options.clear()
    here = []

    def new_group(
        ranks, *, backend, pg_options, group_desc, device_id, use_local_synchronization, timeout
    ):
        assert use_local_synchronization
        asked[here[0]].append((tuple(ranks), group_desc, backend, device_id))
        waits[group_desc] = timeout.total_seconds()
        if backend == "nccl":
            overlap_options[here[0]].append(pg_options)
            assert pg_options is None or pg_options._timeout == timeout
        return (tuple(ranks), group_desc)

    monkeypatch.setattr(mesh_module.dist, "new_group", new_group)

    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(mesh_module.dist, "ProcessGroupNCCL", nccl, raising=False)

    def make(shape, *, device=None, timeout_s=None, **uses):
        use = CommunicatorUse(**uses)
        meshes = []
        for rank in range(shape.num_ranks):
            here[:] = [rank]
            mesh = Mesh(shape, rank=rank, timeout_s=1.0, device=device)
            meshes.append(mesh.connect(use, timeout_s=timeout_s))
            mesh.make_range_groups(use.ranges)
            for kind in mesh.replica_ranks if use.gathers_weights else []:
                mesh.gather_group(kind)
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


def test_messages_beside_compute_do_not_wait_for_it_and_take_few_multiprocessors(groups):
    """Gathers of MSP shards, which compute waits for, may take every multiprocessor instead."""
    _, asked = groups(
        MeshShape(2, 3, 2),
        device=GPU,
        cuts_units=True,
        ties_ends=True,
        ranges=[(0, 2)],
        gathers_weights=True,
    )
    chosen = {}
    for rank, of in asked.items():
        over_nccl = [purpose for _, purpose, backend, _ in of if backend == "nccl"]
        chosen |= dict(zip(over_nccl, overlap_options[rank], strict=True))
    urgent = {purpose for purpose, options in chosen.items() if options is not None}
    assert urgent == {
        "gathers of stage",
        "weights for 0 to 2",
        "ends",
        "pipeline",
        *(f"pipeline {a} to {b}" for a, b in [(0, 1), (1, 0), (1, 2), (2, 1)]),
    }
    for purpose in urgent:
        assert chosen[purpose].is_high_priority_stream
        assert 4 <= chosen[purpose].config.max_ctas <= 8


USES = {
    "pipeline": (MeshShape(1, 4, 1), CommunicatorUse()),
    "interleaved": (MeshShape(1, 3, 1), CommunicatorUse(wraps=True)),
    "tied": (MeshShape(2, 3, 2), CommunicatorUse(ties_ends=True)),
    "MSP": (
        MeshShape(1, 4, 2),
        CommunicatorUse(ranges=[(0, 1), (0, 3), (1, 2)], cuts_units=True, ties_ends=True),
    ),
    "ZeRO-3": (MeshShape(2, 2, 2), CommunicatorUse(gathers_weights=True)),
    "Megatron": (MeshShape(2, 2, 4, key_copies=2), CommunicatorUse(gathers_weights=True)),
    "Megatron, one replica": (
        MeshShape(1, 2, 2, key_copies=1),
        CommunicatorUse(gathers_weights=True),
    ),
    "alone": (MeshShape(), CommunicatorUse(ties_ends=True)),
}


@pytest.mark.parametrize("case", USES)
def test_a_communicator_has_a_stream(groups, case):
    """The budget counts what the mesh makes, and so does the memory that plans leave for it."""
    shape, use = USES[case]
    groups(shape, device=GPU, **asdict(use))
    for rank in range(shape.num_ranks):
        high = sum(options is not None for options in overlap_options[rank])
        made = len(overlap_options[rank]) - high, high
        assert count_streams(shape, shape.coordinates(rank), use) == made


def test_more_streams_than_torch_has_are_refused():
    def from_the_first(size):
        return CommunicatorUse(ranges=[(0, last) for last in range(1, size)])

    check_streams(MeshShape(1, 16, 2), from_the_first(16), num_lanes=1)
    refused = "35 CUDA streams of one priority, and torch has 32: .* write parallel.multiplexed=off"
    with pytest.raises(ValueError, match=refused):
        check_streams(MeshShape(1, 32, 1), from_the_first(32), num_lanes=1)
    copies = count_streams(MeshShape(), Coordinates(0, 0, 0), CommunicatorUse(), num_lanes=2)
    assert copies == (4, 0)


def test_planned_ranges_have_streams():
    """Whatever else of a run with shared units takes some."""
    model = ModelConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=2, mlp_size=128)
    workload = Workload(model, PRESETS["h100"])
    most = pipeline_links(Candidate(workload, (1,), pipeline_parallel_degree=2)).most_ranges
    ranges = [(0, 31 - place) for place in range(int(most))]
    more = {"wraps": True, "cuts_units": True, "ties_ends": True}
    check_streams(MeshShape(2, 32, 2), CommunicatorUse(ranges=ranges, **more), num_lanes=2)
    too_many = [*ranges, *((0, last) for last in range(1, 5))]
    with pytest.raises(ValueError, match="CUDA streams"):
        check_streams(MeshShape(2, 32, 2), CommunicatorUse(ranges=too_many, **more), num_lanes=2)
