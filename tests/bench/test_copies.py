"""Copies: rates with both directions busy, a real disk, and plans that use the rates."""

import errno
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from sppo.activations.tensor_classes import class_bytes_per_token
from sppo.bench import disk
from sppo.bench.copies import CopyMeasurements, CopyPoint, busy_rates, measure_point
from sppo.bench.hardware_description import describe
from sppo.cli.bench_tables import copies_screen
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.stages.links import copy_bytes_per_s
from sppo.cost.stages.seconds import stage_seconds
from sppo.hardware.file import hardware_json, read_hardware
from sppo.hardware.presets import PRESETS
from sppo.offload.disk.disk_room import DiskRoom
from sppo.planning.run_plan import plan_run
from sppo.units import MIB
from tests.bench.test_hardware_description import NOTHING
from tests.bench.test_timing import Watcher
from tests.planning.cases import run_config

LAPTOP = PRESETS["laptop-cpu"]
SLOW = CopyPoint(16 * MIB, 9e6, 8e6, 3e6, 4e6)
DISK = CopyMeasurements("disk", "a disk", (SLOW,), planned=SLOW, room_bytes=1 << 34)


def test_rates_count_only_while_both_directions_are_busy():
    """Four requests of 10 bytes in 4 s; the other direction ends after 2 of its own at 1 s."""
    assert busy_rates([1, 2, 3, 4], [0.5, 1.0], request_bytes=10) == (10, 20)
    assert busy_rates([], [2, 4], request_bytes=10) == (0, 5)
    # The first request counts even if it outlasts all of the other direction.
    assert busy_rates([8], [1, 2], request_bytes=10) == (1.25, 10)


def test_a_point_is_the_median_of_rounds_of_all_three():
    asked, seconds = [], iter([1, 1, 1, 2, 2, 2, 4, 4, 4])

    def run(out, back):
        asked.append((out, back))
        second = next(seconds)
        return [second] * out, [second] * back

    watcher = Watcher()
    point = measure_point(run, request_bytes=8, rounds=3, advance=watcher.advance)
    assert asked == [(True, False), (False, True), (True, True)] * 3
    assert (point.out_alone_bytes_per_s, point.back_bytes_per_s) == (4, 4)
    assert point.spread == pytest.approx((8 - 2) / 4)
    assert watcher.advanced == 3


def test_a_real_disk(tmp_path):
    watcher = Watcher()
    found = disk.measure_disk(tmp_path, quick=True, watcher=watcher)
    assert list(tmp_path.iterdir()) == []
    assert watcher.advanced == sum(total for _, total in watcher.begun)
    assert found.planned in found.points
    assert found.planned.request_bytes == 16 * MIB
    rates = [value for point in found.points for value in list(asdict(point).values())[1:5]]
    assert min(rates) > 1e6
    assert "page cache" in found.where
    assert "both at once: " in list(copies_screen(found))[-1]


def test_an_error_of_the_disk_is_not_lost():
    class Broken:
        size_bytes = 64 * MIB

        def write(self, offset_bytes, array):
            raise OSError(errno.EIO, "the disk is faulty")

        read = write

    halves = [np.zeros(MIB, dtype=np.uint8)] * 2
    windows = disk._Windows(Broken(), halves, MIB, 0.01)
    with pytest.raises(OSError, match="faulty"):
        windows.run(True, True)


def test_no_room_and_no_directory_are_told_before(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--disk .*absent: there is no such directory"):
        disk.check_disk(tmp_path / "absent", quick=True)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(ValueError, match="cannot be written to"):
            disk.check_disk(tmp_path, quick=True)
    monkeypatch.setattr(disk, "disk_room", lambda path: DiskRoom(free_bytes=MIB))
    with pytest.raises(OSError, match=r"takes 1.0 GiB in .*: 1.0 MiB are free there") as caught:
        disk.check_disk(tmp_path, quick=False)
    assert caught.value.errno == errno.ENOSPC


def test_a_description_has_the_rates_with_both_directions_busy():
    node = describe(LAPTOP, replace(NOTHING, copies=(DISK,))).node
    assert (node.disk_write_bytes_per_s, node.disk_read_bytes_per_s) == (3e6, 4e6)
    assert node.disk_bytes == 1 << 34
    host = replace(DISK, tier="host", room_bytes=0)
    node = describe(PRESETS["h100"], replace(NOTHING, device="cuda", copies=(host,))).node
    assert (node.d2h_bytes_per_s, node.h2d_bytes_per_s) == (3e6, 4e6)
    assert (node.d2h_alone_bytes_per_s, node.h2d_alone_bytes_per_s) == (9e6, 8e6)
    assert node.disk_bytes == PRESETS["h100"].node.disk_bytes


LARGE_DISK = {"available_bytes": 1 << 40, "disk_bytes": 1 << 34}


def offloading(directory, policy):
    """A run whose activations may go to a disk."""
    return run_config(
        "tiny",
        length=16384,
        sequence={"num_subsequences": 8},
        activations={"policy": policy, "disk": str(directory)},
    )


@pytest.mark.parametrize("speed", [1, 8])
def test_a_plan_moves_what_hides_at_the_measured_rate(tmp_path, speed):
    """alpha_i A_i = rate x T_(i+1), in whole classes but one that is cut at 128 rows."""
    planned = replace(SLOW, out_bytes_per_s=speed * 3e6, back_bytes_per_s=speed * 4e6)
    found = replace(DISK, points=(planned,), planned=planned)
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(hardware_json(describe(LAPTOP, replace(NOTHING, copies=(found,))))))
    run = offloading(tmp_path, "sppo")
    plan = plan_run(run, hardware=read_hardware(path), **LARGE_DISK)
    assert plan.hardware.node.disk_write_bytes_per_s == speed * 3e6
    row_bytes = (
        class_bytes_per_token(run.model, run.model.layer_type(0), element_bytes=2)
        * run.model.num_layers
    )
    (stage,) = plan.stages
    moved = [float(np.array(part.offloaded) @ row_bytes) for part in stage.subsequences]
    assert moved[-1] == 0
    hides = hideable_bytes(plan, run)
    for index, size in enumerate(moved[:-1]):
        most = min(hides[index], plan.lengths[index] * row_bytes.sum())
        assert most - 128 * row_bytes.max() <= size <= most, index
    assert 0 < sum(moved) < sum(plan.lengths) * row_bytes.sum()


def hideable_bytes(plan, run):
    """Out behind the next forward and back behind the next backward, by the planner's prices."""
    workload = Workload(run.model, plan.hardware, dtype=run.train.dtype)
    candidate = Candidate(workload, plan.lengths)
    units = stage_seconds(candidate)
    out, back = copy_bytes_per_s(candidate)
    forward, backward = units.forward[0, 1:], (units.backward + units.weight)[0, 1:]
    return np.minimum(forward * out, backward * back)


def test_plans_count_what_copies_cost_the_compute(tmp_path):
    """The same bytes on a machine whose compute feels them: a longer step, by about that much."""
    steps = []
    for cost in (0.0, 1e-9):
        node = replace(LAPTOP.node, copy_compute_s_per_byte=cost)
        run = offloading(tmp_path, "offload_all")
        plan = plan_run(run, hardware=replace(LAPTOP, node=node), **LARGE_DISK)
        steps.append(plan.predicted.step_s)
    moved = plan.predicted.disk_peak_bytes
    assert steps[1] - steps[0] == pytest.approx(2e-9 * moved, rel=0.05)
