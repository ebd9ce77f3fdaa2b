"""Moments in bf16: the update by its formula, training beside fp32 moments, and the memory."""

import pytest
import torch

from sppo.config import load_run
from sppo.config.advice import run_warnings
from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameters import is_decayed
from sppo.offload.lane import Lane
from sppo.optim import fused_adamw
from sppo.optim.adamw import AdamW
from sppo.optim.host_adamw import HostAdamW, OptimizerRows
from sppo.training.preflight import preflight
from sppo.training.records.outcome import predicted_and_measured
from tests.conftest import write_run
from tests.optim.test_adamw import SHAPES, _tensors
from tests.tiers import exhaustive
from tests.training.jobs import job_alone, losses, records, saved_state, train_alone

CONFIG = OptimizerConfig(eps=1e-8, weight_decay=0.1, moments="bf16")


def optimizers(kind, weights, masters):
    if kind == "device":
        return AdamW(weights, config=CONFIG, masters=masters)
    rows = OptimizerRows(SHAPES, config=CONFIG)
    rows.fill(masters)
    return HostAdamW(weights, config=CONFIG, rows=rows, lane=Lane(), bucket_elements=500)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_moments_are_rounded_after_an_update_in_fp32(kind, monkeypatch):
    monkeypatch.setattr(fused_adamw, "_CPU_CHUNK", 100)
    masters = _tensors(0)
    expected = {
        name: [m.clone(), *torch.zeros(2, *m.shape).bfloat16()] for name, m in masters.items()
    }
    weights = {name: master.bfloat16() for name, master in masters.items()}
    optimizer = optimizers(kind, weights, masters)
    (beta1, beta2), lr = CONFIG.betas, 1e-2
    for step in range(1, 5):
        gradients = _tensors(step)
        optimizer.step(gradients, lr=lr)
        for name, (master, average, square) in expected.items():
            g, (m, v) = gradients[name], (average.float(), square.float())
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            master *= 1 - lr * 0.1 * is_decayed(name)
            corrected = (v / (1 - beta2**step)).sqrt() + CONFIG.eps
            master -= lr / (1 - beta1**step) * m / corrected
            average.copy_(m)
            square.copy_(v)
    assert optimizer.steps == 4
    state = optimizer.state()
    for name, (master, average, square) in expected.items():
        torch.testing.assert_close(state[f"model.{name}"], master, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights[name], state[f"model.{name}"].bfloat16())
        for moment, tensor in (("exp_avg", average), ("exp_avg_sq", square)):
            ours = state[f"optimizer.{moment}.{name}"]
            assert ours.dtype is torch.bfloat16
            torch.testing.assert_close(ours, tensor, rtol=2**-7, atol=1e-6)  # one rounding


DISK = {
    "activations.disk": "spill",
    "state.optimizer": "disk",
    "state.gradients": "disk",
    "parallel.virtual_stages": 2,
}


@pytest.mark.parametrize("place", ["disk", *exhaustive("device")])
def test_a_run_learns_alike_resumes_exactly_and_takes_what_is_planned(work, place):
    (work / "spill").mkdir()
    optimizer = {"moments": "bf16", "schedule": "constant"}
    model = {"num_layers": 2, "vocab_size": 512, "hidden_size": 64, "mlp_size": 128}
    write_run(
        work / "run.yaml", optimizer=optimizer, model=model, train={"steps": 12, "dtype": "bf16"}
    )
    where = DISK if place == "disk" else {}
    keep = {**where, "checkpoint.every": 6, "checkpoint.keep": 2}
    run = load_run(work / "run.yaml", keep)
    plan = preflight(job_alone(run)).plan
    outcome = train_alone(run)
    train_alone(
        load_run(work / "run.yaml", {**where, "optimizer.moments": "fp32", "train.output": "wide"})
    )
    ours, theirs = (torch.tensor(losses(work / name))[:, 0] for name in ("out", "wide"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)
    assert not torch.equal(ours, theirs)

    half = {**keep, "train.output": "again"}
    train_alone(load_run(work / "run.yaml", {**half, "train.steps": 6}))
    train_alone(load_run(work / "run.yaml", half))
    assert losses(work / "again") == losses(work / "out")
    whole, resumed = (
        saved_state(work / name / "checkpoints/step_000012") for name in ("out", "again")
    )
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())

    memory = plan.stages[0].memory
    found = predicted_and_measured(memory.device, outcome.buckets, all_bytes=outcome.peak_bytes)
    predicted, measured = found["optimizer"]
    assert measured == pytest.approx(predicted, rel=0.01)
    if place == "disk":
        behind = records(work / "out")[0]["disk_peak_bytes"]
        assert behind == pytest.approx(memory.tier_state_bytes, rel=0.01)
    parameters = sum(t.numel() for n, t in whole.items() if n.startswith("model."))
    planned = memory.host_optimizer_bytes if place == "disk" else memory.device.optimizer_bytes
    assert planned == 8 * parameters


def test_a_slow_second_moment_is_warned_of(work):
    words = ["optimizer.moments=bf16", "optimizer.betas=[0.9, 0.999]"]
    (warning,) = run_warnings(load_run(work / "run.yaml", words))
    assert warning.startswith("optimizer.betas[1]=0.999 changes the second moment by less")
    assert not [*run_warnings(load_run(work / "run.yaml", words[:1]))]
