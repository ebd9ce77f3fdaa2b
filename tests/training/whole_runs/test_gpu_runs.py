"""Runs on GPUs: against a CPU on a real GPU, and on several ranks of a fake CUDA runtime."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from sppo.config import load_run
from sppo.offload.cuda_lane import CudaLane
from sppo.training import trainer
from sppo.training.devices import cuda_device
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import choose_device
from sppo.training.job import FAILED_STEP_TIMEOUT_S
from tests.fake_cuda import fake_gpu, steps_lock_nothing
from tests.training.jobs import evaluate_initial, losses, train_alone, train_rank
from tests.training.whole_runs.test_parallel_runs import MODEL, overrides


def gpu_test(test, *, count=1):
    mark = pytest.mark.gpu if count == 1 else pytest.mark.multigpu
    there = torch.cuda.is_available() and torch.cuda.device_count() >= count
    return mark(pytest.mark.skipif(not there, reason=f"needs {count} CUDA devices")(test))


def two_gpus_test(test):
    return gpu_test(test, count=2)


def train_on_a_fake_gpu(rank, directory, arguments):
    """One rank of a run, in the rank pool."""
    with fake_gpu() as (device, runtime), steps_lock_nothing(runtime):
        checked, outcome = train_rank(rank, directory, arguments, device=device, reports=True)
    assert runtime.locked_sizes
    assert runtime.locked == set()
    return (
        checked.plan.activation_tier,
        outcome.done_steps,
        sum(c.total_out_bytes for c in outcome.copies) > 0,
    )


def train_with_state_in_host_memory(rank, directory, arguments):
    """Steps done by one rank, and how long it would wait for a device that stands still."""
    with mock.patch.object(cuda_device, "CudaLane", wraps=CudaLane) as made:
        _, steps, _ = train_on_a_fake_gpu(rank, directory, arguments)
    return steps, made.call_args.kwargs["failed_step_timeout_s"]


def test_ranks_unlock_the_state_that_they_keep_in_host_memory(ranks, work, run_file):
    run_file(
        model={**MODEL, "num_layers": 4},
        train={"steps": 2, "dtype": "bf16", "sequences_per_step": 2},
        state=dict.fromkeys(("weights", "gradients", "optimizer"), "host"),
    )
    arguments = overrides((1, 2, 1), 2, **{"parallel.virtual_stages": 2})
    done = ranks.run(train_with_state_in_host_memory, work, arguments, ranks=2)
    assert done == [(2, FAILED_STEP_TIMEOUT_S)] * 2


# On a real one


def train(run, device):
    outcome = train_alone(run, device=device, reports=True)
    return outcome, [loss for loss, _ in losses(outcome.output)]


ATTENTION_ALONE = {**MODEL, "hidden_size": 128, "head_size": 64, "num_heads": 4}
LINEAR = {
    **ATTENTION_ALONE,
    "layer_types": ["linear", "full"],
    "linear_attention": {"key_heads": 2, "value_heads": 4, "key_size": 64, "value_size": 64},
    "attention_gate": True,
}


@pytest.fixture(params=[ATTENTION_ALONE, LINEAR], ids=["attention alone", "linear attention"])
def small(work, run_file, request):
    """A run of a model that every kernel takes, and the losses of the CPU."""

    def of(output, **sections):
        return load_run(
            run_file(
                model=request.param,
                train={"output": output, "dtype": "bf16"},
                **sections,
            )
        )

    _, expected = train(of("cpu"), CpuDevice())
    return of, expected


@pytest.mark.parametrize(
    "sections",
    [
        {"activations": {"policy": "retain"}},
        {"activations": {"policy": "recompute"}},
        {"activations": {"policy": "offload_all", "debug": True}},
        {"activations": {"policy": "offload_all", "tier": "disk", "disk": "spill"}},
        {"state": {"optimizer": "host"}},
    ],
    ids=str,
)
@gpu_test
def test_losses_on_a_gpu_are_those_of_the_cpu(small, work, sections):
    (work / "spill").mkdir()
    of, expected = small
    run = of("gpu", **sections)
    outcome, found = train(run, choose_device(run))
    assert found == pytest.approx(expected, rel=2e-2)
    executed = outcome.last_step
    seconds = [done.finish_s - done.start_s for done in executed.trace]
    assert all(0 < s < 60 for s in seconds)
    starts = [done.start_s for done in executed.trace]
    assert starts == sorted(starts)


@gpu_test
def test_where_activations_go_changes_no_bit(work, run_file, monkeypatch):
    """In fp32, in which attention is products of matrices and can add in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    (work / "spill").mkdir()
    everywhere = (
        {"policy": "retain"},
        {"policy": "recompute"},
        {"policy": "offload_all"},
        {"policy": "offload_all", "tier": "disk", "disk": "spill"},
    )

    def losses_of(activations):
        output = f"gpu-{activations['policy']}-{activations.get('tier')}"
        run = load_run(run_file(activations=activations, train={"output": output, "dtype": "fp32"}))
        return train(run, choose_device(run))[1]

    torch.use_deterministic_algorithms(True)
    try:
        retained, *others = map(losses_of, everywhere)
    finally:
        torch.use_deterministic_algorithms(False)
    assert others == [retained] * 3


@gpu_test
def test_evaluation_on_a_gpu_is_that_of_the_cpu(small):
    of, _ = small
    run = of("never")
    assert evaluate_initial(run, device=choose_device(run)).loss == pytest.approx(
        evaluate_initial(run).loss, rel=1e-2
    )


@gpu_test
def test_nothing_waits_for_a_gpu_inside_a_step(small, monkeypatch):
    """CUDA itself refuses what would make the host wait while actions are issued."""
    from sppo.engine.executor import Executor

    of, _ = small
    run = of("gpu", activations={"policy": "offload_all"})
    original, calls = Executor.run, []

    def watched(self, *arguments, **keywords):
        calls.append(1)
        later = len(calls) > 4  # kernels are compiled, memory is there
        torch.cuda.set_sync_debug_mode("error" if later else "default")
        try:
            return original(self, *arguments, **keywords)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(trainer, "warm_up", lambda run, **_: None)
    monkeypatch.setattr(Executor, "run", watched)
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 8})})
    train(longer, choose_device(longer))
    assert len(calls) == 8


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
@two_gpus_test
def test_two_gpus_do_what_one_does(work, run_file, shape):
    run_file(
        model={**MODEL, "hidden_size": 128, "head_size": 64},
        train={"steps": 3, "sequences_per_step": 2, "dtype": "bf16"},
    )

    def losses_of(output, degrees, *more):
        words = [*overrides(degrees, 3, **{"train.output": output}), *more]
        command = [sys.executable, "-m", "sppo", "train", "run.yaml", *words]
        subprocess.run(command, check=True, timeout=300)
        return [loss for loss, _ in losses(work / output)]

    expected = losses_of("alone", (1, 1, 1))
    assert losses_of("kept", shape) == pytest.approx(expected, rel=2e-2)
    moved = losses_of("moved", shape, "activations.policy=offload_all")
    assert moved == pytest.approx(expected, rel=2e-2)
