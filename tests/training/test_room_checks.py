"""Memory that a run's plan needs, against the memory that is free."""

from dataclasses import replace

import pytest

from sppo.hardware.presets import PRESETS
from sppo.offload.copy_report import CopyReport
from sppo.offload.disk.disk_room import DiskRoom
from sppo.planning.run_plan import plan_run
from sppo.training.preflight import FreeMemory, check_room
from sppo.training.report import copies_summary
from sppo.units import GIB
from tests.planning.cases import run_config

RUN = run_config(
    "tiny",
    length=16384,
    activations={"policy": "offload_all"},
    checkpoint={"async_save": True},
    parallel={"pipeline_parallel_degree": 2},
    hardware="auto",
)


@pytest.fixture(scope="module")
def plan():
    """Of two ranks: one offloads most, a checkpoint has most of the other."""
    made = plan_run(RUN, hardware=PRESETS["h200"], available_bytes=64 * GIB, host_bytes=64 * GIB)
    fullest = max(rank.tier_activations_bytes for rank in made.rank_memory)
    saved = [rank.background_save_bytes for rank in made.rank_memory]
    most = saved.index(max(saved))
    stages = [
        replace(
            stage,
            memory=replace(
                stage.memory, tier_activations_bytes=fullest // 4 if rank == most else fullest
            ),
        )
        for rank, stage in enumerate(made.stages)
    ]
    made = replace(made, stages=tuple(stages))
    peak = max(sum(buckets.values()) for buckets in made.rank_tier_buckets("host"))
    return replace(made, predicted=replace(made.predicted, host_peak_bytes=peak))


def test_each_rank_has_its_own_sum_of_host_memory(plan):
    def check(host_bytes):
        check_room(RUN, plan, FreeMemory("cuda", 64 * GIB, host_bytes, DiskRoom(free_bytes=0), 2))

    saved = {rank.background_save_bytes for rank in plan.rank_memory}
    assert len(saved) == 2
    check(plan.predicted.host_peak_bytes)
    with pytest.raises(MemoryError, match=r"of host memory .* checkpoint\.async_save=false"):
        check(plan.predicted.host_peak_bytes - 1)


def test_copies_are_summed_up_without_saves_of_other_ranks(plan):
    summary = copies_summary(plan, [CopyReport()])
    assert summary is not None
    most = max(rank.tier_activations_bytes for rank in plan.rank_memory)
    assert summary.host_bytes.predicted == most
