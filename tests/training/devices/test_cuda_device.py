"""GPU as the device of a rank: chosen, filled, measured, and synchronized only if necessary."""

import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sppo.config import load_run
from sppo.cost.memory.state_memory import checkpoint_bytes
from sppo.engine.engine import Engine
from sppo.engine.stage import Stage
from sppo.engine.trace import CudaStopwatch, Trace
from sppo.hardware.description import HOST_FRACTION
from sppo.hardware.file import hardware_json
from sppo.hardware.numa import NumaNode
from sppo.hardware.presets import PRESETS
from sppo.kernels.native.machine_memory import MemoryRoom
from sppo.optim.host_adamw import HostAdamW
from sppo.parallel.job.environment import RankEnvironment
from sppo.planning.plan import read_plan
from sppo.schedule.actions import Action, ActionKind
from sppo.training import preflight as preflight_module
from sppo.training import trainer
from sppo.training.devices import cuda_device
from sppo.training.devices import device as devices
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.cuda_device import (
    ALLOCATOR_VARIABLES,
    SETTINGS,
    CudaDevice,
    prepare_cuda,
)
from sppo.training.devices.device import check_devices, choose_device, device_kind
from sppo.training.preflight import check_trainable, preflight
from sppo.training.run_checkpoints import RunCheckpoints
from sppo.training.warm_up import warm_up
from sppo.units import GIB, MIB
from tests import fake_cuda
from tests.conftest import refuse, succeed, write_run
from tests.fake_cuda import NAME, fake_gpu
from tests.training.jobs import (
    evaluate_initial,
    job_alone,
    job_beside,
    losses,
    records,
    summary,
    train_alone,
)

MODEL = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3}
GPUS = 2


@pytest.fixture(autouse=True)
def _quick(work, monkeypatch):
    monkeypatch.setattr(trainer, "warm_up", lambda run, **_: None)
    (work / "spill").mkdir()


@pytest.fixture
def gpus(monkeypatch):
    """A machine on which torch sees two GPUs; none may be used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(devices, "device_kind", device_kind)  # whatever conftest makes of it


def run_of(work, output="out", **sections):
    train = {"output": output, "steps": 3, **sections.pop("train", {})}
    return load_run(write_run(work / "run.yaml", model=MODEL, train=train, **sections))


def place(*, local_rank=0, local_ranks=1, launcher="torchrun"):
    return RankEnvironment(local_rank, local_ranks, local_rank, local_ranks, "here", 1, launcher)


def train(run, device):
    """(outcome, records) of a run, with its report written."""
    outcome = train_alone(run, device=device, reports=True)
    return outcome, records(outcome.output)


# Which device


def test_a_gpu_is_used_where_there_is_one(work, gpus, monkeypatch):
    device = choose_device(run_of(work), environment=place(local_rank=1, local_ranks=2))
    assert device == CudaDevice(torch.device("cuda:1"))
    assert device.group_device == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(run_of(work)) == CpuDevice()


def test_a_description_of_a_cpu_keeps_a_run_on_it(work, gpus):
    preset = run_of(work, hardware={"preset": "laptop-cpu"})
    (work / "hardware.json").write_text(json.dumps(hardware_json(PRESETS["laptop-cpu"])))
    file = run_of(work, hardware={"file": "hardware.json"})
    for run in (preset, file):
        assert device_kind(run) == "cpu"
        assert choose_device(run) == CpuDevice()
    assert check_devices(run, local_ranks=8) == "cpu"


def test_a_gpu_that_is_not_there_is_said(work, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refuse("train", "run.yaml", "hardware.preset=h200")
    assert "hardware: h200 is a GPU, and torch" in error
    assert "write hardware.preset=laptop-cpu" in error
    assert not (work / "out").exists()


def test_more_ranks_than_gpus_are_refused_before_any_starts(work, gpus, monkeypatch):
    monkeypatch.setattr("sppo.training.start.run_ranks", None)
    words = ("parallel.data_parallel_degree=4", "train.sequences_per_step=4")
    error = refuse("train", "run.yaml", *words)
    assert "4 ranks on this machine, 2 GPUs: every rank needs one of its own" in error


def test_srun_may_show_each_task_its_own_gpu_alone(work, gpus, monkeypatch):
    run = run_of(work)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = choose_device(run, environment=place(local_rank=3, local_ranks=4, launcher="slurm"))
    assert found.torch_device == torch.device("cuda:0")
    with pytest.raises(ValueError, match="4 ranks on this machine, 1 GPU:"):
        choose_device(run, environment=place(local_rank=3, local_ranks=4))


@pytest.fixture
def no_settings(monkeypatch):
    for name in (*SETTINGS, *ALLOCATOR_VARIABLES):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.parametrize("given", [*SETTINGS, "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_stay(monkeypatch, no_settings, given):
    monkeypatch.setenv(given, "mine")
    prepare_cuda()
    assert os.environ[given] == "mine"
    allocator = [name for name in ALLOCATOR_VARIABLES if name in os.environ]
    assert len(allocator) == 1, "torch reads the first of them, whoever set it"
    others = SETTINGS.keys() - {given, *ALLOCATOR_VARIABLES}
    assert all(os.environ[name] == SETTINGS[name] for name in others)


def test_the_store_of_a_rank_has_two_streams():
    plan = SimpleNamespace(offloads_anything=True, activation_tier="host")
    with fake_gpu() as (device, runtime):
        made = mock.Mock(side_effect=runtime.Stream)
        runtime.Stream = made
        options = {"disk": None, "debug": False, "failed_step_timeout_s": 5.0}
        device.block_store(plan, **options)
        assert made.call_count == 2


def test_a_rank_stays_next_to_its_gpu_and_shares_its_cores(monkeypatch):
    node, threads = NumaNode(1, frozenset({4, 5})), [8]
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(
        cuda_device, "node_of_pci_device", lambda address: {"0000:1b:00.0": node}[address]
    )
    with fake_gpu() as (device, runtime):
        device.begin()
        runtime.device_count = lambda: 2  # both next to the same node
        device.begin(place(local_ranks=2))
    assert runtime.counts.set_to == [device.torch_device] * 2
    assert runtime.counts.near == [node, node]
    assert threads == [8, 2, 1], "no more than there are cores"


def test_a_rank_that_is_bound_far_from_its_gpu_says_so(monkeypatch, caplog):
    node = NumaNode(1, frozenset({4, 5}))
    monkeypatch.setattr(cuda_device, "node_of_pci_device", lambda address: node)
    cuda_device._warn_of_far_cores.cache_clear()
    with fake_gpu() as (device, _):
        monkeypatch.setattr(cuda_device, "stay_near", lambda node: NumaNode(1, frozenset()))
        device.begin()
        device.begin()
    assert caplog.text.count("no core of NUMA node 1, which is next to the GPU") == 1
    assert "--distribution=block:block" in caplog.text


# What a run does with it


IN_HOST_MEMORY = {
    "optimizer": {"state": {"optimizer": "host"}},
    "all": {
        "state": {"weights": "host", "gradients": "host", "optimizer": "host"},
        "parallel": {"virtual_stages": 3},
    },
}


@pytest.mark.parametrize("which", IN_HOST_MEMORY)
def test_a_run_that_fails_unlocks_what_it_locked(work, which, monkeypatch):
    fail = mock.Mock(side_effect=OSError("at odds"))
    run = run_of(work, **IN_HOST_MEMORY[which])
    for owner, name in (
        (Stage, "forward"),
        (RunCheckpoints, "resume"),
        (HostAdamW, "_upload"),
        (Engine, "__init__"),
    ):
        with monkeypatch.context() as broken, fake_gpu() as (device, runtime):
            broken.setattr(owner, name, fail)
            with pytest.raises(OSError, match="at odds"):
                train(run, device)
            assert runtime.locked_sizes
            assert runtime.locked == set(), name


def test_the_host_waits_for_the_device_only_between_steps(work, monkeypatch):
    original, waits = Engine.accumulate, []

    with fake_gpu() as (device, runtime):

        def accumulate(self, *arguments, **keywords):
            before = runtime.counts.waits
            done = original(self, *arguments, **keywords)
            waits.append(runtime.counts.waits - before)
            return done

        run = run_of(work, activations={"policy": "offload_all"})
        job = job_alone(run, device=device)
        checked = preflight(job)
        monkeypatch.setattr(Engine, "accumulate", accumulate)
        trainer.train(checked)
        assert runtime.counts.set_to == [device.torch_device]
        assert runtime.counts.waits > 0
    first, *others = waits
    assert others == [0, 0]
    assert first <= 1, "making room gives up what was there before"


def test_warming_up_leaves_nothing_behind(work):
    run = run_of(work)
    with fake_gpu() as (device, runtime):
        warm_up(run, lengths=(16, 16, 16, 16), device=device)
        assert runtime.counts.trims == 1


def test_memory_is_what_torch_reserves_beyond_the_baseline(work):
    with fake_gpu() as (device, _):
        outcome, steps = train(run_of(work, activations={"policy": "offload_all"}), device)
    assert outcome.base.held_bytes == 40 * MIB
    assert outcome.peak_bytes == 80 * MIB
    assert {record["device_peak_bytes"] for record in steps} == {80 * MIB}
    assert outcome.buckets.working_bytes == 20 * MIB
    ring = outcome.copies[-1].device_bytes
    assert outcome.buckets.copies_bytes == ring > 0
    told = summary(work / "out")
    copies, node = told["copies"], PRESETS["h200"].node
    assert copies["host_bytes"]["measured"] == copies["host_bytes"]["predicted"] > 0
    assert copies["out_bytes_per_s"]["predicted"] == node.d2h_bytes_per_s
    assert told["memory_bytes"]["all"]["measured"] == 40 * MIB
    assert told["predicted_for"].startswith(f"1 x {NAME}")


def test_evaluation_is_that_of_the_cpu(work):
    run = run_of(work)
    expected = evaluate_initial(run)
    with fake_gpu() as (device, runtime):
        assert evaluate_initial(run, device=device) == expected
        assert runtime.counts.set_to == [device.torch_device]
    with fake_gpu(free_bytes=1000) as (device, runtime):
        runtime.memory_reserved = runtime.memory_allocated = lambda device: 0
        with pytest.raises(MemoryError, match="tokens needs .* and 1000 B may be used"):
            evaluate_initial(run, device=device)


def test_the_command_says_what_it_trains_on_and_where_tensors_go(work, monkeypatch):
    with fake_gpu() as (device, _):
        monkeypatch.setattr(devices, "device_kind", lambda run: "cuda")
        monkeypatch.setattr(devices, "choose_device", lambda run, **_: device)
        offloading = ("train", "run.yaml", "activations.policy=offload_all")
        said = succeed(*offloading)
        assert f"fp32 on {NAME} (cpu), torch" in said
        assert " to host memory and back: 100% to 100% of what" in said
        assert "all 4 steps were done before" in succeed(*offloading)
        words = ("activations.policy=offload_all", "hardware.preset=h200", "train.output=planned")
        succeed("solve", "run.yaml", *words, "hardware.devices_per_node=1", "-o", "plan.json")
        succeed("train", "run.yaml", *words, "--plan", "plan.json")
        assert json.loads(succeed("eval", "run.yaml", "--json"))["step"] == 4
    assert losses(work / "out") == losses(work / "planned")


# What it has room for


def test_no_plan_fills_what_the_driver_and_others_need(work):
    run = run_of(work)
    with fake_gpu() as (device, _):
        plan = preflight(job_alone(run, device=device)).plan
    assert plan.hardware.device.kind == "cuda"
    assert plan.hardware.device.memory_bytes <= fake_cuda.TOTAL_BYTES - 4 * GIB
    assert plan.hardware.node.num_devices == 1
    with fake_gpu(free_bytes=20_000) as (device, runtime):
        runtime.memory_reserved = runtime.memory_allocated = lambda device: 0
        with pytest.raises(MemoryError, match="even with everything recomputed"):
            preflight(job_alone(run, device=device))


def test_host_memory_is_shared_by_the_ranks_of_a_machine(work, monkeypatch):
    """Whether the plan is made now or was made before."""
    run = run_of(work, activations={"policy": "offload_all"})
    room = "sppo.training.devices.cuda_device.memory_room"
    with fake_gpu() as (device, _):
        before = preflight(job_alone(run, device=device)).plan
        monkeypatch.setattr(room, lambda: MemoryRoom(machine_bytes=100_000))
        assert device.host_tier_bytes(local_ranks=2) == 42_500
        for plan in (before, None):
            with pytest.raises(MemoryError, match="of host memory than .* lower .*offload_ratio"):
                preflight(job_alone(run, device=device), plan)
        run = run_of(work, activations={"offload_ratio": 0.2})
        plan = preflight(job_alone(run, device=device)).plan
    assert 0 < plan.predicted.host_peak_bytes <= 85_000


@pytest.mark.parametrize("planned", [False, True])
def test_a_save_in_the_background_needs_host_memory_beside_a_plan(work, monkeypatch, planned):
    run = run_of(work, activations={"policy": "offload_all"}, checkpoint={"async_save": True})
    before = run if planned else run_of(work, activations={"policy": "offload_all"})
    with fake_gpu() as (device, _):
        plan = preflight(job_alone(before, device=device)).plan
        taken = plan.stages[0].memory.tier_activations_bytes
        (saved,) = checkpoint_bytes(plan.candidate())
        assert plan.predicted.host_peak_bytes == taken + saved * planned
        room = MemoryRoom(machine_bytes=int((taken + saved / 2) / HOST_FRACTION))
        monkeypatch.setattr("sppo.training.devices.cuda_device.memory_room", lambda: room)
        with pytest.raises(
            MemoryError, match="saved in the background .* checkpoint.async_save=false"
        ):
            preflight(job_alone(run, device=device), plan)


def test_host_memory_that_is_limited_by_the_run(work):
    run = run_of(work, activations={"policy": "offload_all", "host_memory": 4096})
    with fake_gpu() as (device, _), pytest.raises(MemoryError, match="raise activations.host_mem"):
        preflight(job_alone(run, device=device))


def test_every_communicator_of_a_plan_is_counted(work):
    parallel = {"pipeline_parallel_degree": 3, "multiplexed": "on", "schedule": "sppo_msp"}
    run = run_of(work, parallel=parallel, activations={"policy": "offload_all"})
    with fake_gpu() as (device, _), mock.patch.object(preflight_module, "check_streams") as checked:
        preflight(job_beside(run, local_ranks=3, device=device))
    shape, use = checked.call_args.args
    assert shape.pipeline_parallel == 3
    assert use.ranges == [(0, 1), (0, 2), (1, 2)]
    assert checked.call_args.kwargs == {"num_lanes": 1}


def test_the_machines_of_a_run_are_as_many_as_its_ranks_fill(work):
    parallel = {"data_parallel_degree": 4, "pipeline_parallel_degree": 3}
    run = run_of(work, parallel=parallel, train={"sequences_per_step": 4})
    with fake_gpu() as (device, _):
        hardware = preflight(job_beside(run, local_ranks=6, device=device)).plan.hardware
    assert (hardware.num_nodes, hardware.node.num_devices) == (2, 6)


def test_a_plan_that_moves_to_a_disk_needs_a_directory(work):
    offloading = {"policy": "offload_all", "tier": "disk"}
    named = run_of(work, activations={**offloading, "disk": "spill"})
    with fake_gpu() as (device, _):
        plan = preflight(job_alone(named, device=device)).plan
        with pytest.raises(ValueError, match=r"needs a disk: write activations\.disk=DIR"):
            preflight(job_alone(run_of(work, activations=offloading), device=device), plan)


def test_a_plan_of_a_cpu_is_not_for_a_gpu(work):
    succeed("solve", "run.yaml", "hardware.preset=laptop-cpu", "-o", "cpu.json")
    run, plan = load_run("run.yaml"), read_plan(work / "cpu.json")
    check_trainable(run, plan, kind="cpu")
    with pytest.raises(ValueError, match="laptop-cpu, and this run is trained on a GPU"):
        check_trainable(run, plan, kind="cuda")


# Clocks


def test_actions_are_timed_by_events():
    with fake_gpu() as (device, runtime):
        watch = CudaStopwatch(device.torch_device)
        trace, action = Trace(watch), Action(ActionKind.F, 0, 0, 0)
        marks = [watch.mark() for _ in range(3)]
        trace.add(action, *marks[:2])
        trace.add(action, *marks[1:])
        assert runtime.counts.waits == 0
        first, second = trace.actions()
        assert trace.actions() == (first, second)
        assert runtime.counts.waits == 1
    assert first.start_s == pytest.approx(marks[0].at_s, abs=1e-3)
    assert first.start_s < first.finish_s == second.start_s < second.finish_s
    assert trace.seconds(ActionKind.F) == pytest.approx(marks[2].at_s - marks[0].at_s, abs=1e-6)
