"""Planned, simulated and executed programs are the same: equal digests everywhere."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from sppo.config.loading import check_run
from sppo.engine.unit import SequenceData
from sppo.hardware.presets import PRESETS
from sppo.planning.plan import check_program, plan_json, read_plan
from sppo.planning.run_plan import plan_run
from sppo.schedule.actions import ActionKind
from sppo.schedule.orders.names import (
    LOOPED,
    WHOLE_SEQUENCES,
    WITH_VIRTUAL_STAGES,
    schedule_names,
)
from sppo.training.job import mesh_shape
from sppo.training.state import build_state
from tests.random_training.emulated_ranks import run_emulated
from tests.training.jobs import job_alone, job_of_rank

LENGTH = 96
MODEL = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 24,
}


@dataclass(frozen=True)
class Setting:
    """Of one plan."""

    schedule: str
    degrees: tuple[int, int, int]
    sharding: str
    policy: str
    tier: str
    sequences: int

    @property
    def virtual_stages(self):
        fits = 2 * self.degrees[1] <= MODEL["num_layers"]
        return 2 if self.schedule in WITH_VIRTUAL_STAGES and fits else 1

    @property
    def kv(self):
        """What becomes of K and V where ranks have several stages."""
        if self.schedule != LOOPED or self.virtual_stages == 1:
            return "auto"
        return "recompute" if self.tier == "device" else "offload"


SETTINGS = [
    Setting("gpipe", (1, 2, 2), "megatron", "offload_all", "host", 2),
    Setting("1f1b", (2, 1, 2), "megatron", "sppo", "disk", 2),
    Setting("1f1b", (1, 2, 1), "zero 2", "offload_all", "host", 2),
    Setting("zb_h1", (2, 2, 1), "zero 3", "offload_all", "host", 1),
    Setting("interleaved_1f1b", (2, 2, 1), "zero 2", "offload_all", "disk", 1),
    Setting("seq1f1b", (1, 3, 1), "zero 2", "sppo", "host", 1),
    Setting("seq_zb_h1", (1, 2, 2), "ulysses", "offload_all", "disk", 2),
    Setting("interleaved_seq1f1b", (1, 2, 2), "zero 2", "retain", "device", 2),
    Setting("sppo", (1, 4, 1), "ulysses", "retain", "device", 1),
    Setting("sppo", (1, 1, 1), "zero 3", "keep_attention", "device", 2),
    Setting("sppo_msp", (1, 2, 1), "zero 2", "retain", "device", 2),
    Setting("sppo_msp", (2, 2, 1), "ulysses", "sppo", "host", 1),
    Setting("looped_bfs", (2, 2, 1), "zero 3", "offload_all", "host", 1),
    Setting("looped_bfs", (1, 2, 2), "zero 2", "keep_attention", "device", 2),
]
"""Every schedule, and every value of the other fields."""
assert {setting.schedule for setting in SETTINGS} == {*schedule_names()}


def run_of(setting, disk):
    data, pipeline, sequence = setting.degrees
    whole = setting.schedule in WHOLE_SEQUENCES
    keys = {
        "model": MODEL,
        "data": {"tokens": "."},
        "sequence": {"length": LENGTH, "num_subsequences": 1 if whole else 3, "alignment": 1},
        "parallel": {
            "data_parallel_degree": data,
            "pipeline_parallel_degree": pipeline,
            "sequence_parallel_degree": sequence,
            "sequence_parallel": "megatron" if setting.sharding == "megatron" else "ulysses",
            "zero": {"zero 2": 2, "zero 3": 3}.get(setting.sharding, 1),
            "schedule": setting.schedule,
            "virtual_stages": setting.virtual_stages,
        },
        "activations": {"policy": setting.policy, "kv": setting.kv},
        "train": {"dtype": "fp32", "sequences_per_step": data * setting.sequences},
    }
    if setting.tier != "device":
        keys["activations"] |= {"disk": str(disk), "tier": setting.tier}
    return check_run(keys, source="test")


def plan_of(setting, run):
    """For a machine with the tier; on a host tier what a GPU would do, executed here on a disk."""
    room = 1 << 34
    if setting.tier == "host":
        machine = PRESETS["a100-80g"]
        return plan_run(run, hardware=machine, available_bytes=room, host_bytes=room)
    machine = PRESETS["laptop-cpu"]
    return plan_run(run, hardware=machine, available_bytes=room, disk_bytes=room)


def execute(rank, run, plan):
    """(place in the pipeline, executed actions) of one rank."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        job = job_of_rank(run, rank) if mesh_shape(run).num_ranks > 1 else job_alone(run)
        state = build_state(job, plan)
        tokens = torch.arange(LENGTH + 1) % MODEL["vocab_size"]
        data = [SequenceData(tokens[:-1], tokens[1:])] * plan.sequences
        try:
            done = state.engine.accumulate(data, [plan.boundaries] * plan.sequences)
        finally:
            state.close()
        return job.mesh.at.pipeline, tuple(executed.action for executed in done.trace)


def executed_digests(run, plan):
    """Of every pipeline of ranks."""
    ranks = mesh_shape(run).num_ranks
    done = run_emulated(execute, run, plan, ranks=ranks, seed=0)
    by_place = {}
    for place, actions in done:
        by_place.setdefault(place, set()).add(actions)
    assert all(len(found) == 1 for found in by_place.values()), "replicas do the same"
    programs = tuple(by_place[place].pop() for place in sorted(by_place))
    return plan.program().with_programs(programs).digest()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_planned_simulated_and_executed_programs_are_one(setting, tmp_path):
    run = run_of(setting, tmp_path)
    plan = plan_of(setting, run)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_json(plan)), encoding="utf-8")
    read = read_plan(file)
    check_program(read)
    simulated, _ = read.evaluated().case()
    kinds = {action.kind for program in simulated.programs for action in program}
    assert (ActionKind.D2H in kinds) == (ActionKind.H2D in kinds) == plan.offloads_anything
    assert (ActionKind.KV in kinds) == (setting.kv == "recompute")
    assert simulated.digest() == plan.program_digest == executed_digests(run, read)


def test_a_plan_of_another_program_is_refused(tmp_path):
    run = run_of(Setting("sppo", (1, 2, 1), "ulysses", "retain", "device", 1), tmp_path)
    plan = plan_of(Setting("sppo", (1, 2, 1), "ulysses", "retain", "device", 1), run)
    with pytest.raises(ValueError, match=r"digest 000000000000, and here .*again with sppo solve"):
        check_program(replace(plan, program_digest="0" * 64))
