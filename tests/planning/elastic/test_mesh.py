"""Meshes that samples are cut by: equal times, and what limits them."""

import numpy as np
import pytest

from sppo.config.model import ModelConfig
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.planning.elastic.mesh import equal_mesh, mesh_of_first_slice
from sppo.planning.elastic.sample_cost import sample_cost

MODEL = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=2, num_heads=1, num_kv_heads=1, mlp_size=256
)
LONGEST = 50_000


@pytest.fixture(scope="module")
def cost():
    workload = Workload(MODEL, PRESETS["laptop-cpu"], dtype="bf16")
    return sample_cost(workload, most_tokens=LONGEST)


def seconds(cost, mesh):
    """What each slice of the longest sample takes, by the cost model itself."""
    ends = np.array(mesh.ends, dtype=np.float64)
    begins = np.array([0, *mesh.ends[:-1]], dtype=np.float64)
    return cost.without_attention_s(ends - begins) + cost.attention_s(begins, ends)


def test_equal_tokens_where_nobody_waits():
    mesh = equal_mesh(1000, 300)
    assert (mesh.slices, mesh.room, mesh.slice_s) == ((300, 300, 300, 100), 300, None)


def test_slices_from_a_first_one_on(cost):
    mesh = mesh_of_first_slice(cost, longest=LONGEST, first=8192, least=0, room=9000, alignment=8)
    found = seconds(cost, mesh)[:-1]  # what is left is the last one's
    assert mesh.slices[0] == 8192
    assert mesh.room == 9000
    assert all(tokens % 8 == 0 for tokens in mesh.slices[:-1])
    assert 0.97 * mesh.slice_s < found.min() <= found.max() < 1.01 * mesh.slice_s


def test_later_slices_are_not_shorter_than_is_asked(cost):
    mesh = mesh_of_first_slice(
        cost, longest=LONGEST, first=8192, least=6000, room=8192, alignment=1
    )
    assert min(mesh.slices[:-1]) == 6000
    assert seconds(cost, mesh)[-2] > 1.05 * mesh.slice_s


def test_a_mesh_for_long_samples_serves_shorter_ones(cost):
    long, short = (
        mesh_of_first_slice(cost, longest=longest, first=4096, least=0, room=4096, alignment=64)
        for longest in (LONGEST, 20_000)
    )
    assert all(
        abs(one - other) <= 64 for one, other in zip(long.ends, short.ends[:-1], strict=False)
    )


def test_a_first_slice_longer_than_all_samples_sets_the_time_alone(cost):
    mesh = mesh_of_first_slice(cost, longest=100, first=1000, least=0, room=2000, alignment=1)
    assert mesh.ends == (100,)
    whole = mesh_of_first_slice(cost, longest=1000, first=1000, least=0, room=2000, alignment=1)
    assert mesh.slice_s == whole.slice_s
