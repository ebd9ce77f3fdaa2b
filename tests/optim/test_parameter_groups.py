"""Groups of parameters with their own rate and decay, against torch's param_groups."""

import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import load_run
from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameter_groups import by_update_rule, update_rule
from sppo.offload.lane import Lane
from sppo.optim.adamw import AdamW
from sppo.optim.host_adamw import HostAdamW, OptimizerRows
from sppo.training.weights.starting_weights import starting_weights
from tests.conftest import refuse, write_run
from tests.optim.test_adamw import SHAPES, _tensors
from tests.training.jobs import losses, train_alone, trained

GROUPS = (
    {"match": "layers.*.bias", "lr": "16x", "weight_decay": 0.3},
    {"match": "embed.*", "lr": "0.1x", "weight_decay": 0},
    {"match": "*.weight", "lr": "2x"},  # what is left, which decays as it did
)
CONFIG = OptimizerConfig.model_validate({"weight_decay": 0.1, "eps": 1e-8, "groups": GROUPS})
FACTORS = {
    "embed.weight": (0.1, 0.0),
    "layers.0.q.weight": (2.0, 0.1),
    "layers.0.q.bias": (16.0, 0.3),
    "layers.0.attention_norm.weight": (2.0, 0.0),
    "head.weight": (2.0, 0.1),
}


def optimizers(kind, weights):
    if kind == "device":
        return AdamW(weights, config=CONFIG)
    rows = OptimizerRows(SHAPES, config=CONFIG)
    rows.fill(weights)
    return HostAdamW(weights, config=CONFIG, rows=rows, lane=Lane(), bucket_elements=100)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_the_update_is_that_of_torch_param_groups(kind):
    ours = _tensors(0)
    theirs = {name: torch.nn.Parameter(weight.clone()) for name, weight in ours.items()}
    groups = [{"params": [theirs[n]], "weight_decay": decay} for n, (_, decay) in FACTORS.items()]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    optimizer = optimizers(kind, ours)
    for step in range(4):
        gradients, lr = _tensors(step + 1), 1e-2 / (step + 1)
        for group, (factor, _) in zip(plain.param_groups, FACTORS.values(), strict=True):
            group["lr"] = lr * factor
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        plain.step()
        optimizer.step(gradients, lr=lr)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name].data, rtol=1e-6, atol=1e-6)


def test_the_first_match_wins_and_rules_are_few():
    assert {name: tuple(update_rule(name, CONFIG)) for name in SHAPES} == FACTORS
    assert by_update_rule(SHAPES, OptimizerConfig()) == {
        (1.0, 0.1): ["embed.weight", "layers.0.q.weight", "head.weight"],
        (1.0, 0.0): ["layers.0.q.bias", "layers.0.attention_norm.weight"],
    }


RUN = {
    "model": {"num_layers": 2},
    "optimizer": {
        "eps": 1e-4,
        "groups": [
            {"match": "layers.0.*", "lr": "0x", "weight_decay": 0},
            {"match": "*norm*", "lr": "4x"},
        ],
    },
}


def test_a_run_shards_and_streams_its_groups(ranks, work):
    """A group of rate 0 stays as it is; sharded and streamed state has the same losses."""
    write_run(work / "run.yaml", **RUN)
    train_alone(load_run(work / "run.yaml"))
    (work / "spill").mkdir()
    state = [f"state.{part}=disk" for part in ("weights", "gradients", "optimizer")]
    layouts = {
        "sharded": ["parallel.sequence_parallel_degree=2", "parallel.zero=3"],
        "streamed": [
            *("parallel.pipeline_parallel_degree=1", "parallel.virtual_stages=2"),
            *("activations.disk=spill", *state),
        ],
    }
    words = [*layouts["sharded"], "train.output=sharded"]
    ranks.run(trained, work, words, ranks=2)
    train_alone(load_run(work / "run.yaml", [*layouts["streamed"], "train.output=streamed"]))
    expected = torch.tensor(losses(work / "out"))
    for name in layouts:
        torch.testing.assert_close(torch.tensor(losses(work / name)), expected, rtol=1e-4, atol=0)
    for name, weight in starting_weights(load_run(work / "run.yaml")):
        for output in ("out", *layouts):
            _, weights = read_weights(work / output)
            assert torch.equal(weights[name], weight) == name.startswith("layers.0."), name


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ("[{match: layer.0.*}]", "match 'layer.0.*' matches no parameter; near are layers.0."),
        ("[{match: '*'}, {match: embed.weight}]", "matches belongs to groups before it"),
        ("[{match: '*', lr: 1e-4}]", "optimizer.groups.0.lr"),
        ("[{match: '*', rate: 2x}]", "unknown key. Known keys: lr, match, weight_decay"),
        ("[{lr: 2x}]", "optimizer.groups.0.match"),
    ],
)
def test_groups_that_cannot_be_meant(work, groups, told):
    assert told in refuse("train", "run.yaml", f"optimizer.groups={groups}")
    assert not (work / "out").exists()
