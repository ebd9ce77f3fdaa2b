"""Training loop against ordinary training with torch's own parts."""

import io
from statistics import median

import pytest
import torch
from rich.console import Console

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import load_run
from sppo.kernels.cross_entropy import LossTerms
from sppo.optim.learning_rate import learning_rate
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.preflight import preflight
from sppo.training.weights.starting_weights import starting_weights
from tests.conftest import LENGTH, write_tokens
from tests.engine.reference import reference_loss
from tests.training.jobs import job_alone, records, summary, train_alone

pytestmark = pytest.mark.usefixtures("work")


@pytest.fixture
def known_peak(monkeypatch):
    """Peak FLOPs per second of this device, as a GPU has them."""
    monkeypatch.setattr(CpuDevice, "peak_flops_per_s", lambda self, dtype: 1e10)


def train(run):
    screen = io.StringIO()
    outcome = train_alone(run, console=Console(file=screen))
    return outcome, records(outcome.output), screen.getvalue()


def ordinary(run):
    """(losses, gradient norms, weights) of the same run by autograd and torch.optim."""
    weights = {n: w.clone().requires_grad_() for n, w in starting_weights(run)}
    data = preflight(job_alone(run)).data
    config = run.optimizer
    groups = [
        {"params": [w for w in weights.values() if (w.dim() > 1) is matrices], "weight_decay": rate}
        for matrices, rate in ((True, config.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    losses, norms = [], []
    for step in range(run.train.steps):
        optimizer.zero_grad()
        terms = LossTerms(run.train.label_smoothing, run.train.z_loss)
        consumed = step * run.train.sequences_per_step
        sequences = [data.row([sample]) for sample in data.step_samples(consumed)]
        loss = reference_loss(run.model, weights, sequences, terms=terms)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), config.clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=config, total_steps=run.train.steps)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, weights


@pytest.mark.parametrize(
    "sections",
    [
        {
            "train": {"sequences_per_step": 3},
            "data": {"shuffle": True},
            "sequence": {"boundaries": [0, 1, 30, 64], "num_subsequences": "auto"},
        },
        {"data": {"isolate_documents": True}},
        {"optimizer": {"clip_norm": 0.5, "warmup_steps": 2, "weight_decay": 0.3}},
        {"train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    ],
    ids=str,
)
def test_losses_norms_and_weights_are_those_of_ordinary_training(work, run_file, sections):
    write_tokens(work / "documents", num_tokens=6 * LENGTH + 1, documents=(10, 64, 90, 200))
    keys = {name: dict(section) for name, section in sections.items()}
    keys["data"] = {"tokens": "documents", **keys.get("data", {})}
    keys["optimizer"] = {"eps": 1e-5, **keys.get("optimizer", {})}
    run = load_run(run_file(**keys))
    losses, norms, weights = ordinary(run)
    _, steps, _ = train(run)
    assert [r["loss"] for r in steps] == pytest.approx(losses, rel=1e-5)
    assert [r["grad_norm"] for r in steps] == pytest.approx(norms, rel=1e-4)
    for name, weight in read_weights("out")[1].items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("known_peak")
def test_rates_and_tokens_of_a_step(run_file):
    _, steps, _ = train(load_run(run_file(train={"sequences_per_step": 2})))
    for record in steps:
        assert record["tokens"] == 2 * LENGTH
        assert record["tokens_per_s"] == pytest.approx(2 * LENGTH / record["step_s"])
        assert 0 < record["mfu"] <= record["hfu"]
        assert record["offloaded_bytes"] == record["exposed_copy_s"] == 0
    assert steps[0]["lr"] == 1e-2
    assert steps[-1]["lr"] < steps[0]["lr"]


def test_what_a_call_reports(run_file):
    screen = io.StringIO()
    first = train_alone(load_run(run_file()), console=Console(file=screen), reports=True)
    steps, told = records(first.output), summary(first.output)
    assert steps[0]["mfu"] is steps[0]["hfu"] is None, "a CPU's peak is shared"
    assert (first.first_step, first.done_steps, first.interrupted_by) == (0, 4, None)
    assert len(first.phases_s) == 4
    assert all(min(phases_s) > 0 for phases_s in first.phases_s)
    assert 0 < first.base.held_bytes <= first.peak_bytes
    assert first.wall_s > sum(map(sum, first.phases_s))
    assert screen.getvalue().count("\nstep ") == 3
    for place, phase in enumerate(("forward", "backward", "data and update")):
        measured, planned = (
            median(of_step[place] for of_step in steps_s)
            for steps_s in (first.phases_s, first.planned_phases_s)
        )
        assert told["phases_s"][phase] == {"predicted": planned, "measured": measured}
    second, _, _ = train(load_run(run_file(train={"steps": 6})))
    assert (second.first_step, second.done_steps, len(second.phases_s)) == (4, 6, 2)
