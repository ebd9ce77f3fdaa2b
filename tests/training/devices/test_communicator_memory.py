"""Memory of communicators on a fake device, of which every new group takes some."""

import logging
from types import SimpleNamespace

import pytest
import torch

from sppo.cost.communicators import CommunicatorUse
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.parallel import mesh as mesh_module
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import MeshShape
from sppo.parallel.msp_exchange import MspLinks
from sppo.training.connections import check_communicators
from sppo.units import MIB

EACH = 100 * MIB
FREE = 2000 * MIB
CPU = torch.device("cpu")


@pytest.fixture
def connected(monkeypatch):
    """The groups of a rank that are connected for each way of messages, by (members, purpose)."""
    found = set()
    ways = {}

    def add(way, group):
        """NCCL connects a group for trees, rings and NVLS when a message first takes them."""
        ways.setdefault(group, set()).add(way)
        if len(ways[group]) == 3:
            found.add(group)

    def add_sum(token, *, group):
        add("trees" if token.numel() == 1 else "NVLS", group)

    def new_group(ranks, *, group_desc, **_):
        return tuple(ranks), group_desc

    nccl = SimpleNamespace(Options=lambda **_: SimpleNamespace(config=SimpleNamespace()))
    dist = mesh_module.dist
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", add_sum)
    monkeypatch.setattr(dist, "broadcast", lambda token, *, group, group_src: add("rings", group))
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, token, *, group: None)
    return found


def connect(connected, *, communicators_bytes, beside_bytes):
    names = MemoryBuckets.__dataclass_fields__
    planned = MemoryBuckets(
        **{
            **dict.fromkeys(names, 0),
            "weights_bytes": beside_bytes,
            "communicators_bytes": communicators_bytes,
        }
    )
    mesh = Mesh(MeshShape(2, 3, 2), rank=1, timeout_s=1.0, device=CPU)
    mesh.connect(CommunicatorUse(ties_ends=True, cuts_units=True)).send_first_messages()
    MspLinks(mesh, device=CPU).connect([(0, 1), (0, 2)])
    taken = len(connected) * EACH
    check_communicators(taken, left_bytes=FREE - taken, planned=planned)


def test_every_group_of_collectives_is_connected_before_it_is_measured(connected, caplog):
    with caplog.at_level(logging.INFO):
        connect(connected, communicators_bytes=7 * EACH, beside_bytes=FREE - 7 * EACH)
    assert {purpose for _, purpose in connected} == {
        "sequence",
        "stage",
        "ends",
        *(f"{what} {first} to {last}" for what, first, last in _RANGES),
    }
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "take 700.0 MiB of the device, planned 700.0 MiB" in record.message


_RANGES = [(what, 0, last) for what in ("MSP shards on", "weights for") for last in (1, 2)]


def test_more_than_planned_is_a_warning_while_there_is_room(connected, caplog):
    connect(connected, communicators_bytes=2 * EACH, beside_bytes=FREE // 2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "take 700.0 MiB of the device, planned 200.0 MiB: if memory runs out" in record.message


def test_a_plan_without_room_beside_them_is_refused_with_a_remedy(connected):
    with pytest.raises(MemoryError, match=r"needs 1.4 GiB beside.*NCCL_BUFFSIZE=2097152 in"):
        connect(connected, communicators_bytes=6 * EACH, beside_bytes=FREE - 6 * EACH)
