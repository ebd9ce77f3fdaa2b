"""Working sets of pipeline ranks in whole runs on a CPU, against the plan's."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest

from sppo.config import load_run
from sppo.kernels.native.cpu_allocator import install_cpu_allocator
from sppo.training import trainer
from sppo.training.preflight import preflight
from tests.conftest import write_run, write_tokens
from tests.training.jobs import job_of_rank

MODEL = {
    "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_size": 64,
    "mlp_size": 704,
}  # fmt: skip


def working_bytes(rank, directory):
    """Predicted and measured bytes of one rank's working set and messages, in the rank pool."""
    with (
        contextlib.chdir(directory),
        mock.patch.object(trainer, "warm_up", return_value=None),
    ):
        run = load_run(Path("run.yaml"), ())
        job = job_of_rank(run, rank)
        checked = preflight(job)
        outcome = trainer.train(job, checked)
    plan = checked.plan
    device = plan.rank_memory[rank].device
    saved = device.activations_bytes + device.loss_gradient_bytes
    return (
        plan.schedule,
        (device.working_bytes + device.communication_bytes, outcome.buckets.working_bytes),
        (saved, outcome.buckets.activations_bytes),
    )


@pytest.mark.parametrize(
    ("policy", "multiplexed", "sequences"),
    [
        pytest.param("retain", "on", 1, marks=pytest.mark.exhaustive),
        ("keep_attention", "on", 2),
        pytest.param("retain", "off", 2, marks=pytest.mark.exhaustive),
        ("recompute", "off", 1),
    ],
)
def test_two_ranks_take_what_is_planned(ranks, tmp_path, policy, multiplexed, sequences):
    if install_cpu_allocator() is None:
        pytest.skip("torch's CPU tensors live in the C heap here")
    write_tokens(tmp_path / "tokens", num_tokens=20000)
    write_run(
        tmp_path / "run.yaml",
        model=MODEL,
        sequence={"length": 4096, "num_subsequences": 4},
        parallel={"pipeline_parallel_degree": 2, "multiplexed": multiplexed},
        activations={"policy": policy},
        train={"steps": 2, "dtype": "fp32", "sequences_per_step": sequences, "output": "out"},
    )
    for schedule, (predicted, measured), (saved, activations) in ranks.run(
        working_bytes, tmp_path, ranks=2
    ):
        assert (schedule == "sppo_msp") == (multiplexed == "on")
        assert saved == pytest.approx(activations, rel=1e-4)
        assert predicted == pytest.approx(measured, rel=0.05)
