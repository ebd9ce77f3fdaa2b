"""Adapters on the upper layers: stages below have no backward, and losses are those of one rank."""

import pytest
import torch

from sppo.config import load_run
from tests.conftest import write_run, write_tokens
from tests.tiers import default_of
from tests.training.jobs import losses, train_alone, train_rank

KEYS = {
    "model": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    "adapter": {"rank": 2, "layers": "2-3"},
    "optimizer": {"schedule": "constant", "eps": 1e-4},
    "train": {"steps": 3, "dtype": "fp32", "output": "alone", "sequences_per_step": 3},
}
STAGES = {"parallel.virtual_stages": 2}
RUNS = {
    "seq1f1b": {"parallel.schedule": "seq1f1b"},
    "deferred": {"parallel.schedule": "seq_zb_h1"},
    "interleaved": {"parallel.schedule": "interleaved_seq1f1b", **STAGES},
    "pieces": {"parallel.schedule": "sppo_msp", "parallel.virtual_stages": 1},
    "looped, offloaded": {
        **STAGES,
        "activations.disk": "spill",
        "activations.kv": "offload",
        "activations.policy": "offload_all",
    },
}


def train_as(rank, directory, arguments):
    """One rank of a run; returns the kinds of actions that it executed in its last step."""
    torch.set_num_threads(1)
    checked, outcome = train_rank(rank, directory, arguments)
    last = outcome.timelines
    if last is None:
        return None
    digests = {timeline.schedule.digest() for timeline in (last.planned, last.measured)}
    assert digests == {checked.plan.program_digest}, "planned, simulated and executed are one"
    return [{(a.kind.value, a.stage) for a in track.actions} for track in last.measured.ranks]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found = tmp_path_factory.mktemp("alone")
    write_tokens(found / "tokens")
    write_run(found / "run.yaml", **KEYS)
    (found / "spill").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        train_alone(load_run("run.yaml"))
    return found


@pytest.mark.parametrize("name", default_of(RUNS, "seq1f1b", "pieces"))
def test_losses_are_those_of_one_rank(ranks, alone, name):
    keys = {"parallel.pipeline_parallel_degree": 2, "train.output": name, **RUNS[name]}
    words = [f"{key}={value}" for key, value in keys.items()]
    executed, _ = ranks.run(train_as, alone, words, ranks=2)
    assert executed is not None
    stages = 2 * RUNS[name].get("parallel.virtual_stages", 1)
    backward = {stage for own in executed for kind, stage in own if kind == "B"}
    reduced = {stage for own in executed for kind, stage in own if kind == "REDUCE"}
    assert backward == reduced == {*range(stages // 2, stages)}
    found, expected = (torch.tensor(losses(alone / output)) for output in (name, "alone"))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0.0)
