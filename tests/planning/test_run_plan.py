"""Plan of a run as it stands: free memory decides what is retained; written keys are kept."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sppo.activations.policy import POLICIES
from sppo.activations.tensor_classes import LINEAR
from sppo.cost.parameters import num_parameters
from sppo.hardware.presets import PRESETS
from sppo.planning.partition import boundaries_by_length
from sppo.planning.run_plan import USABLE_FRACTION, evaluation_boundaries, plan_run
from sppo.planning.search.solver import solve
from sppo.units import MIB
from tests.planning.cases import A100, machine
from tests.planning.cases import run_config as any_run

LAPTOP = PRESETS["laptop-cpu"]
PLENTY = 1 << 40


def run_config(*, policy="auto", dtype="bf16", num_subsequences=8, virtual_stages=1, **sequence):
    """A run whose ranks have one stage, unless more are asked for."""
    if "boundaries" not in sequence:
        sequence["num_subsequences"] = num_subsequences
    return any_run(
        "tiny",
        length=sequence.pop("length", 16384),
        sequence=sequence,
        activations={"policy": policy},
        parallel={"virtual_stages": virtual_stages},
        train={"dtype": dtype},
        hardware="auto",
    )


def plan(run=None, *, available_bytes=PLENTY):
    return plan_run(run or run_config(), hardware=LAPTOP, available_bytes=available_bytes)


def peak_bytes(policy):
    """What the run needs under a policy that was asked for."""
    return plan(run_config(policy=policy)).predicted.device_peak_bytes


def test_no_more_is_recomputed_than_must_be():
    """85 percent of what is free may be used; a little less and a subsequence is recomputed."""
    everything = peak_bytes("retain") / USABLE_FRACTION
    assert plan(available_bytes=int(everything) + 5).policy == "retain"
    less = plan(available_bytes=int(everything) - 5)
    assert less.policy == "hybrid"
    (stage,) = less.stages
    assert [part.recomputed for part in stage.subsequences[1:]] == [(0, 0, 0)] * 7
    assert stage.subsequences[0].recomputed == (0, 0, less.lengths[0])


@pytest.mark.parametrize("num_subsequences", [8, "auto"])
def test_less_memory_is_never_faster(num_subsequences):
    least, most = (peak_bytes(policy) for policy in ("recompute", "retain"))
    run = run_config(num_subsequences=num_subsequences)
    steps = [
        plan(run, available_bytes=int((least + share * (most - least)) / USABLE_FRACTION) + 5)
        for share in (0, 0.2, 0.4, 0.6, 0.8, 1)
    ]
    seconds = [each.predicted.step_s for each in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_state_leaves_a_cpu_by_itself_and_a_refusal_names_the_key():
    run = run_config()
    free = int(peak_bytes("recompute") / USABLE_FRACTION) - 12 * MIB
    small = {"hardware": LAPTOP, "available_bytes": free}
    with pytest.raises(MemoryError, match=r"; write activations\.disk=DIR, shorten"):
        plan_run(run, **small)
    disk = run.activations.model_copy(update={"disk": "spill"})
    run = run.model_copy(update={"activations": disk})
    assert plan_run(run, disk_bytes=PLENTY, **small).state.optimizer == "disk"
    stays = run.with_values({"state.optimizer": "device"})
    with pytest.raises(MemoryError, match=r"; write state\.optimizer=auto, shorten"):
        plan_run(stays, disk_bytes=PLENTY, **small)


@pytest.mark.parametrize("disk_bytes", [0, 1 << 24, PLENTY])
def test_what_is_said_to_be_needed_is_enough_and_nothing_less_is(disk_bytes):
    """With a disk too, whose places may take more than is moved; in MiB, as it is said."""
    run = run_config(dtype="fp32")
    if disk_bytes:
        offloading = run.activations.model_copy(update={"disk": "."})
        run = run.model_copy(update={"activations": offloading})
    room = {"hardware": LAPTOP, "disk_bytes": disk_bytes}
    with pytest.raises(MemoryError, match="16384 tokens needs .* with everything rec") as refused:
        plan_run(run, available_bytes=1 << 20, **room)
    needed = float(re.search(r"needs ([\d.]+) MiB", str(refused.value)).group(1)) * MIB
    plan_run(run, available_bytes=int((needed + MIB) / USABLE_FRACTION), **room)
    with pytest.raises(MemoryError):
        plan_run(run, available_bytes=int((needed - MIB) / USABLE_FRACTION), **room)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_was_asked_for_is_taken_or_refused(policy):
    needed = peak_bytes(policy)
    chosen = plan(run_config(policy=policy), available_bytes=needed)
    assert chosen.stages[0].subsequences[0].recomputed[LINEAR] == (
        0 if policy == "retain" else chosen.lengths[0]
    )
    with pytest.raises(MemoryError, match=f"with .*policy={policy}, and .* write .*policy=auto"):
        plan(run_config(policy=policy), available_bytes=needed - 1)


def cuts_of(run, *, hardware=LAPTOP):
    return evaluation_boundaries(run, hardware=hardware)


def test_pieces_of_an_evaluation_are_automatic_by_device():
    automatic = run_config(num_subsequences="auto")
    assert len(cuts_of(automatic)) == 8 + 1
    assert len(cuts_of(automatic, hardware=A100)) == 2 + 1
    assert len(cuts_of(run_config(length=100, num_subsequences="auto"))) == 1 + 1


def test_a_stage_alone_waits_for_nobody_so_its_pieces_are_equal():
    alone = run_config(num_subsequences=4)
    assert cuts_of(alone) == boundaries_by_length(16384, num_subsequences=4, alignment=128)
    parallel = alone.parallel.model_copy(update={"pipeline_parallel_degree": 2})
    piped = alone.model_copy(update={"parallel": parallel})
    assert cuts_of(piped) == cuts_of(run_config(num_subsequences=4, partition="flops"))


GPU = replace(PRESETS["h200"], node=replace(PRESETS["h200"].node, num_devices=1, numa_nodes=1))


def plan_on_gpu(*, host_bytes=PLENTY, disk_bytes=0, async_save=False, state=None, **activations):
    run = any_run(
        "tiny",
        length=16384,
        activations=activations,
        train={"dtype": "bf16"},
        checkpoint={"async_save": async_save},
        state=state or {},
        hardware="auto",
    )
    return plan_run(
        run,
        hardware=GPU,
        available_bytes=PLENTY,
        disk_bytes=disk_bytes,
        host_bytes=host_bytes,
    )


def test_a_save_in_the_background_takes_host_memory():
    offloading, saving = (
        plan_on_gpu(policy="offload_all", async_save=saves).predicted.host_peak_bytes
        for saves in (False, True)
    )
    copied = saving - offloading
    assert copied == 12 * num_parameters(any_run("tiny").model)
    less = plan_on_gpu(async_save=True, tier="disk", disk="spill", disk_bytes=PLENTY)
    assert less.predicted.host_peak_bytes >= copied > 0 == less.predicted.disk_peak_bytes
    with pytest.raises(MemoryError, match=r"write checkpoint\.async_save=false, or end other"):
        plan_on_gpu(async_save=True, host_bytes=copied - 1)
    with pytest.raises(MemoryError, match=r"a lower activations\.offload_ratio"):
        plan_on_gpu(policy="offload_all", async_save=True, host_bytes=offloading // 2)


def test_host_memory_that_is_short_is_said_with_what_would_fit():
    needed = plan_on_gpu(policy="offload_all").predicted.host_peak_bytes
    with pytest.raises(MemoryError, match="more of host memory than .* end other programs"):
        plan_on_gpu(policy="offload_all", host_bytes=needed // 2)
    with pytest.raises(MemoryError, match=r"or raise activations\.host_memory"):
        plan_on_gpu(policy="offload_all", host_memory=needed // 2)
    with pytest.raises(ValueError, match=r"activations\.tier=host: .* has no host memory"):
        plan_on_gpu(policy="offload_all", tier="host", host_bytes=0)


def test_the_solver_predicts_the_memory_that_training_plans():
    """Of whole sequences on two ranks, which hold more messages than those of the running unit."""
    run = any_run(
        {"preset": "tiny", "num_layers": 4},
        length=8192,
        sequence={"num_subsequences": 1},
        activations={"policy": "retain"},
        parallel={"pipeline_parallel_degree": 2, "schedule": "seq1f1b"},
        train={"dtype": "fp32", "sequences_per_step": 2},
        hardware="auto",
    )
    hardware = machine(LAPTOP, num_devices=2, memory_bytes=PLENTY)
    best = solve(run, hardware=hardware).best
    assert best.device_peak_bytes == plan(run).predicted.device_peak_bytes
    few = {"memory_bytes": best.device_peak_bytes - 1, "reserved_bytes": 0}
    hardware = machine(hardware, **few)
    refused = solve(run, hardware=hardware)
    assert refused.best is None
    assert [one.shortfall.short_bytes for one in refused.rejected if one.shortfall] == [1]
