"""Memory that the state of a run takes while it is created."""

import weakref
from contextlib import closing

import pytest
import torch

from sppo.config import load_run
from sppo.training import state as state_module
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.preflight import preflight
from sppo.training.state import build_state
from sppo.training.weights.starting_weights import starting_weights
from tests.conftest import write_run
from tests.fake_cuda import fake_gpu
from tests.training.jobs import job_alone


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_start_holds_one_parameter_beside_the_rows_of_the_optimizer(work, monkeypatch, tier):
    """Masters are written where they stay: together they would be a third of the rows again."""
    left = []

    def watched(run, names, **more):
        made = []
        for name, weight in starting_weights(run, names, **more):
            left.append(sum(other() is not None for other in made))
            made.append(weakref.ref(weight))
            yield name, weight
            del weight

    monkeypatch.setattr(state_module, "starting_weights", watched)
    (work / "spill").mkdir()
    run = load_run(
        write_run(
            work / "run.yaml",
            state={"optimizer": tier},
            activations={"disk": "spill"} if tier == "disk" else {},
            train={"dtype": "bf16"},
        )
    )
    with fake_gpu() as (gpu, _):
        device = gpu if tier == "host" else CpuDevice()
        job = job_alone(run, device=device)
        plan = preflight(job).plan
        state = build_state(job, plan)
        state.close()
    assert len(left) > 5
    assert max(left) <= 1
    masters = state.optimizer.state()
    assert plan.state.optimizer == tier
    for name, weight in starting_weights(run):
        assert torch.equal(masters[f"model.{name}"], weight)
        assert torch.equal(state.sharded.named(state.weights)[name], weight.bfloat16())


@pytest.mark.parametrize("weights", ["device", "disk"])
def test_frozen_weights_have_no_more_than_their_values(work, weights):
    """They have no sums, masters and moments, and may leave the device without an optimizer."""
    (work / "spill").mkdir()
    run = load_run(
        write_run(
            work / "run.yaml",
            model={"num_layers": 2},
            adapter={"rank": 3, "targets": "q,down"},
            activations={"disk": "spill"},
            parallel={"virtual_stages": 2},
            state={"weights": weights, "gradients": "device", "optimizer": "device"},
            train={"dtype": "bf16"},
        )
    )
    job = job_alone(run)
    plan = preflight(job).plan
    with closing(build_state(job, plan)) as state:
        planned = plan.rank_memory[0].device
        initial = dict(starting_weights(run))
        factors = {name for name in initial if "lora" in name}
        count = sum(initial[name].numel() for name in factors)
        named = state.sharded.named(state.weights)
        assert all(torch.equal(named[name], initial[name].bfloat16()) for name in initial)
        assert set(state.optimizer.masters) == set(state.sharded.owned(state.gradients)) == factors
        stay = factors if weights == "disk" else initial
        held = sum(2 * initial[name].numel() for name in stay)
        steps_bytes = state.optimizer.state()["optimizer.step"].nbytes
        assert state.device_bytes == (held, 4 * count, 12 * count + steps_bytes)
        assert (planned.gradients_bytes, planned.optimizer_bytes) == (4 * count, 12 * count)
        # Frozen weights of both stages are on the device at once.
        assert planned.weights_bytes == sum(2 * weight.numel() for weight in initial.values())
