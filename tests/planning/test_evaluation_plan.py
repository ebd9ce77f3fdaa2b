"""Plans of evaluations without training: degrees, tiers, and lengths that do not fit."""

from __future__ import annotations

import re

import pytest

from sppo.hardware.presets import PRESETS
from sppo.planning.evaluation_plan import plan_evaluation
from sppo.units import GIB
from tests.make import make_run


def planned(length, *, room=70, host=0, model="llama-3.2-1b", degrees=(1, 1, 1), **sections):
    names = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")
    parallel = dict(zip(names, degrees, strict=True)) | sections.pop("parallel", {})
    run = make_run(model, length=length, parallel=parallel, **sections)
    return plan_evaluation(
        run,
        hardware=PRESETS["h100"],
        lengths=[length] * 3,
        room_bytes=room * GIB,
        host_bytes=host * GIB,
    )


def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does():
    with pytest.raises(MemoryError) as refused:
        planned(1 << 20, room=4, parallel={"virtual_stages": 1})
    said = str(refused.value)
    assert said.startswith("evaluating: a sequence of 1048576 tokens needs ")
    assert "(most of it K and V: " in said
    found = re.search(r": sequence.length=(\d+) fits here, or evaluate on more devices", said)
    longest = int(found[1])
    assert planned(longest, room=4, parallel={"virtual_stages": 1}).rows.peak_bytes <= 4 * GIB
    with pytest.raises(MemoryError):
        planned(longest + 1024, room=4, parallel={"virtual_stages": 1})
    assert planned(1 << 20, room=8, degrees=(1, 1, 8)).layout.sequence_parallel_degree == 8


def test_stages_come_one_after_another_where_keys_of_all_do_not_fit():
    plan = planned(1 << 20, room=8)
    stages = plan.layout.virtual_stages
    assert stages > 1
    (memory,) = plan.rows.memory
    whole = planned(1 << 20, room=60)
    assert whole.layout.virtual_stages == 1
    assert memory.kv_bytes == whole.rows.memory[0].kv_bytes / stages
    with pytest.raises(MemoryError):
        planned(1 << 20, room=8, parallel={"virtual_stages": stages // 2})


def test_weights_stream_from_the_host_where_they_do_not_fit():
    with pytest.raises(MemoryError):
        planned(1 << 13, model="gpt-7b", room=8)
    plan = planned(1 << 13, model="gpt-7b", room=8, host=40)
    assert plan.layout.state.weights == "host"
    assert plan.rows.memory[0].weights_bytes < 4 * GIB
    with pytest.raises(MemoryError):
        planned(1 << 13, model="gpt-7b", room=8, host=40, state={"weights": "device"})


def test_only_weights_keys_and_a_working_set_are_counted():
    plan = planned(1 << 13, model="gpt-7b", room=20)
    (memory,) = plan.rows.memory
    assert memory.gradients_bytes == memory.optimizer_bytes == memory.activations_bytes == 0
    assert memory.weights_bytes > 12 * GIB
    assert plan.layout.rank_memory[0].device == memory


def test_stages_and_rows_of_every_degree():
    plan = planned(1 << 13, degrees=(2, 4, 1))
    assert plan.layout.pipeline_parallel_degree == len(plan.rows.memory) == 4
    assert plan.rows.at_once == 2  # of three sequences on two replicas
    assert plan.rows.boundaries[-1] == 1 << 13
    assert planned(1 << 13, parallel={"zero": 3}, degrees=(8, 1, 1)).layout.zero == 3


def test_what_training_asks_for_does_not_matter():
    asked = {"activations": {"policy": "offload_all", "tier": "host"}}
    plan = planned(1 << 16, parallel={"schedule": "sppo_msp"}, degrees=(1, 2, 1), **asked)
    assert not plan.layout.offloads_anything
    assert not plan.layout.uses_msp
    documents = {"data": {"samples": "documents"}, "train": {"tokens_per_step": 1 << 20}}
    assert planned(1 << 16, **documents).rows.boundaries == planned(1 << 16).rows.boundaries
