"""Messages between ranks: measured, written, read by plans, printed."""

import json
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from sppo.bench import messages, suite
from sppo.bench.hardware_description import describe
from sppo.bench.messages import MessageMeasurements, measure_messages
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS as MODELS
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.stages.links import message_bytes, message_seconds
from sppo.cost.trainable import Adapter, Trainable
from sppo.hardware.presets import PRESETS
from sppo.planning.explain import step_parts
from sppo.planning.search.bounds import least_seconds
from sppo.planning.search.evaluation import evaluate_candidate
from tests.bench.failing_process import fail
from tests.bench.test_hardware_description import NOTHING
from tests.bench.test_timing import Watcher
from tests.conftest import refuse, succeed
from tests.planning.cases import price

FOUND = MessageMeasurements(2e9, 1e-4, 3e-9, 0.1)
LAPTOP = PRESETS["laptop-cpu"]


def candidate(per_byte, *, ranks=3, **changes):
    network = replace(LAPTOP.network, message_compute_s_per_byte=per_byte)
    hardware = replace(LAPTOP, network=network, num_nodes=ranks)
    model = ModelConfig.model_validate({**MODELS["tiny"], "num_layers": 6})
    workload = Workload(model, hardware, dtype="fp32")
    return Candidate(
        workload, (300, 200, 100), pipeline_parallel_degree=ranks, policy="retain", **changes
    )


def test_two_processes_measure_their_messages(capfd):
    watcher = Watcher()
    found = measure_messages(quick=True, watcher=watcher)
    assert found.bytes_per_s > 1e6
    assert 0 < found.latency_s < 1
    assert 0 <= found.compute_s_per_byte < 1e-6
    assert (watcher.begun, watcher.advanced) == ([("messages", 2)], 2)
    assert capfd.readouterr().err == ""


def test_a_process_that_fails_is_an_error(monkeypatch):
    before = {*multiprocessing.active_children()}
    monkeypatch.setattr(messages, "_measure", fail)
    with pytest.raises(ValueError, match="no messages here"):
        measure_messages(quick=True, watcher=Watcher())
    assert {*multiprocessing.active_children()} == before


def test_plans_read_what_was_measured():
    network = describe(LAPTOP, replace(NOTHING, messages=FOUND)).network
    assert network == replace(
        LAPTOP.network,
        intra_node_bytes_per_s=2e9,
        intra_node_latency_s=1e-4,
        message_compute_s_per_byte=3e-9,
    )


def test_the_command_tells_what_it_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "measure_messages", lambda **_: FOUND)
    text = " ".join(succeed("bench", "messages", "-o", "hardware.json").split())
    assert "2.00 GB/s, 0.1 ms for a small one; a byte takes 3.00 ns of compute" in text
    assert json.loads(succeed("bench", "messages", "--json"))["messages"]["latency_s"] == 1e-4
    written = json.loads((tmp_path / "hardware.json").read_text())
    assert written["network"]["message_compute_s_per_byte"] == 3e-9


def test_messages_of_gpus_are_refused_and_no_part_of_all(monkeypatch):
    from sppo.cli.bench import Subject

    monkeypatch.setattr(suite, "device_to_measure", lambda: "cuda")
    assert "ranks on the CPU" in refuse("bench", "messages")
    assert "messages" not in Subject.ALL.parts("cuda")
    assert "messages" in Subject.ALL.parts("cpu")


def test_each_end_of_a_message_takes_compute():
    """First and last stage have one neighbour, the one between two."""
    priced = candidate(1e-6)
    expected = 1e-6 * np.outer([1, 2, 1], message_bytes(priced))
    np.testing.assert_allclose(message_seconds(priced), [expected, expected])
    free, costs = map(price, (candidate(0.0), priced))
    np.testing.assert_allclose(costs.forward_s - free.forward_s, expected)
    np.testing.assert_allclose(costs.backward_s - free.backward_s, expected)


def test_one_rank_sends_nothing():
    assert not np.any(message_seconds(candidate(1e-6, ranks=1)))


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_more_stages_carry_more_messages(virtual_stages):
    schedule = "sppo" if virtual_stages == 1 else "looped_bfs"
    priced = candidate(1e-6, virtual_stages=virtual_stages, schedule=schedule)
    crossings = 2 * (3 * virtual_stages - 1)
    expected = crossings * 1e-6 * message_bytes(priced).sum()
    assert [table.sum() for table in message_seconds(priced)] == pytest.approx([expected] * 2)


@pytest.mark.parametrize(("layer", "gradients"), [(1, [1, 2, 1]), (2, [0, 1, 1]), (5, [0, 0, 0])])
def test_stages_without_backward_carry_no_gradients(layer, gradients):
    """Of three stages with two layers each, those below all adapters have none."""
    priced = candidate(1e-6)
    upper = Trainable(Adapter(16, 1.0, layers=(layer,)), ())
    priced = replace(priced, workload=replace(priced.workload, trainable=upper))
    each = 1e-6 * message_bytes(priced)
    expected = np.outer([1, 2, 1], each), np.outer(gradients, each)
    np.testing.assert_allclose(message_seconds(priced), expected)


def test_the_bound_of_a_step_holds_and_its_parts_add_up():
    evaluated = evaluate_candidate(candidate(1e-6))
    assert least_seconds(evaluated.candidate) <= evaluated.step_s
    for rank, parts in enumerate(step_parts(evaluated)):
        assert sum(parts.values()) == pytest.approx(evaluated.step_s)
        carried = sum(float(table[rank].sum()) for table in message_seconds(evaluated.candidate))
        assert parts["carried"] == pytest.approx(carried)
        assert parts["recompute"] == pytest.approx(0, abs=1e-9)


def test_processes_end_when_starting_is_interrupted(monkeypatch):
    from multiprocessing.context import SpawnProcess

    start, started = SpawnProcess.start, []
    before = {*multiprocessing.active_children()}

    def interrupted(process):
        if started:
            raise KeyboardInterrupt
        start(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_messages(quick=True, watcher=Watcher())
    assert started
    assert {*multiprocessing.active_children()} == before
