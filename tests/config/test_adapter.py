"""Section adapter and key train.only: what they accept, and the words for what they do not."""

import json

import pytest

from sppo.config import PRESETS, ConfigError, ModelConfig, load_run
from sppo.config.advice import run_hints
from sppo.cost.trainable import Adapter, check_trainable, trainable_of_run
from tests.conftest import refuse, succeed, write_run

RUN = {
    "model": {"preset": "tiny-test"},
    "data": {"tokens": "tok"},
    "sequence": {"length": 64},
    "adapter": {"rank": 4},
}
ONLY = {**RUN, "adapter": None}


def problem(*words, run=RUN):
    """Path and rule of the only problem of a run."""
    with pytest.raises(ConfigError) as caught:
        load_run(run, words)
    (found,) = caught.value.problems
    return f"{found.path}: {found.rule}"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("adapter.rank=0", "adapter.rank: must be greater than or equal to 1"),
        ("adapter.alpha=0", "adapter.alpha: must be greater than 0"),
        ("adapter.layers=1-2", "adapter.layers: beyond the last layer of the model, 1"),
        ("adapter.targets=[]", "adapter.targets: must not be empty"),
        ("adapter.targets=q,c_attn", "adapter.targets.1: not one of q, k, v"),
        ("adapter.targets=c_attn", "adapter.targets.0: not one of q, k, v"),
        ("adapter.also_train=lm_head", "Did you mean 'head'?"),
        ("train.only=[embed.*]", "adapter.also_train names, such as norms; leave train.only out"),
        ("adapter.lora_alpha=32", "Here it is adapter.alpha"),
        ("adapter.r=16", "Here it is adapter.rank"),
        ("adapter.target_modules=[q_proj]", "Here it is adapter.targets"),
        ("lora_target_modules=[q]", "Here it is adapter.targets"),
        ("adapter.lora_modules_to_save=[lm_head]", "Here it is adapter.also_train"),
        ("adapter.use_rslora=true", "Here it is adapter.scaling=rank_stabilized"),
        ("adapter.lora_dropout=0.05", "Adapters have no dropout: leave it out"),
        ("adapter.use_dora=true", "Adapters are LoRA, not DoRA"),
        ("adapter.load_in_4bit=true", "The base is not quantized"),
        ("adapter.bias=all", "Biases stay frozen"),
        ("adapter.init_lora_weights=pissa", "A starts at random and B at 0"),
        ("adapter=lora", "a mapping of keys to values, such as {rank: 16}"),
        ("lora={rank: 16}", "Here it is the section adapter"),
        ("train.freeze_layers=3", "Here it is train.only"),
    ],
)
def test_adapters_that_cannot_be_meant(word, told):
    assert told in problem(word)


def test_a_model_without_gates_has_no_adapters_of_gates():
    told = problem("model.mlp=gelu", "adapter.targets=gate,up")
    assert "model.mlp=gelu has no gate projection; write targets without gate" in told
    every = load_run(RUN, ["model.mlp=gelu"])
    assert not any("gate" in name for name in trainable_of_run(every).trained_shapes(every.model))


def test_globs_are_a_list_that_is_not_empty():
    assert "must be a list of globs" in problem("train.only=embed.*", run=ONLY)
    assert "must not be empty" in problem("train.only=[]", run=ONLY)


def test_adapters_beside_experts_are_those_of_attention_and_of_the_shared_mlp():
    adapter, model = Adapter(rank=2, scale=1.0), ModelConfig(**PRESETS["glm-4.5-air"])
    dense, routed = ({*adapter.shapes(model, layer)} for layer in (0, 1))
    assert {"gate.lora_a", "up.lora_a", "down.lora_b"} <= dense
    shared = {"shared_gate.lora_a", "shared_up.lora_a", "shared_down.lora_b", "q.lora_a"}
    assert shared <= routed
    assert len(routed) == len(dense)
    assert adapter.shapes(model, 1)["shared_down.lora_a"] == (2, 1408)


@pytest.mark.parametrize("words", ["null", "all-linear", "q,k,v,o,gate,up,down"])
def test_all_projections_in_other_words(words):
    run = load_run(RUN, [f"adapter.targets={words}"])
    assert trainable_of_run(run) == trainable_of_run(load_run(RUN))


@pytest.mark.parametrize(
    ("run", "word", "told"),
    [
        (RUN, "adapter.rank=17", "adapter.rank 17: k is 16 x 32, so its change has a rank of at"),
        (RUN, "adapter={rank: 33, targets: [up]}", "up is 64 x 32"),
        (ONLY, "train.only=[norm*]", "train.only: 'norm*' matches no parameter; near are "),
        (ONLY, "train.only=[embed.*, layer.0.*]", "near are layers.0."),
    ],
)
def test_what_does_not_suit_the_parameters_is_refused_by_all_commands(work, run, word, told):
    write_run(work / "run.yaml", **{name: run[name] for name in ("model", "adapter") if run[name]})
    for command in (["config", "check"], ["config", "parameters"], ["solve"], ["train"]):
        assert told in refuse(*command, "run.yaml", word)
    assert not (work / "out").exists()
    largest = {"adapter.rank=17": "adapter.rank=16", "train.only=[norm*]": "train.only=['*norm*']"}
    check_trainable(load_run(run, [largest.get(word, "train.steps=1")]))


def test_parameters_are_listed_with_what_trains(work):
    write_run(work / "run.yaml", model={"preset": "tiny-test", "num_layers": 2})
    words = ("config", "parameters", "run.yaml")
    text = succeed(*words, "adapter.rank=4", "adapter.layers=1", "adapter.also_train=norms")
    lines = [line.split() for line in text.splitlines()]
    assert ["layers.0.q.weight", "32", "x", "32", "frozen"] in lines
    assert ["layers.1.down.lora_a", "4", "x", "64", "trains"] in lines
    assert ["final_norm.weight", "32", "trains"] in lines
    assert not any("layers.0.q.lora_a" in line for line in lines)
    trained = 4 * (2 * 64 + 2 * 48 + 3 * 96) + 5 * 32
    assert text.splitlines()[-1].endswith("parameters train")
    found = json.loads(succeed(*words, "train.only=['layers.1.q.*', '*norm*']", "--json"))
    trains = {row["name"] for row in found["parameters"] if row["trains"]}
    assert trains == {
        *("layers.1.q.weight", "final_norm.weight"),
        *(
            f"layers.{layer}.{kind}_norm.weight"
            for layer in (0, 1)
            for kind in ("attention", "mlp")
        ),
    }
    assert found["trained"] == 32 * 32 + 5 * 32
    adapted = json.loads(
        succeed(*words, "adapter={rank: 4, layers: 1, also_train: norms}", "--json")
    )
    assert (adapted["trained"], adapted["total"] - found["total"]) == (trained, trained - 5 * 32)


def test_groups_of_frozen_parameters_are_refused(work):
    write_run(work / "run.yaml", adapter={"rank": 4})
    groups = "optimizer.groups=[{match: '*.lora_b', lr: 16x}, {match: embed.*}]"
    told = refuse("config", "check", "run.yaml", groups)
    assert "match 'embed.*' matches only parameters that are frozen" in told
    assert "no problems" in succeed(
        "config", "check", "run.yaml", groups.partition(", {match")[0] + "]"
    )


def hints(*words, run=RUN):
    return [*run_hints(load_run(run, words))]


def test_hints_about_adapters():
    preset = "model.preset=qwen3-0.6b"
    (base,) = hints(preset)
    assert base.startswith("the adapter is beside random weights, which stay as they are")
    for words, told in {
        "optimizer.lr=4e-5": "optimizer.lr 4e-05 is one for whole weights",
        "adapter.targets=q,v": "adapters of all projections usually learn more",
        "model.rope_theta=5e6": "write adapter.also_train=[norms, embed]",
        "adapter.also_train=norms,head": "vLLM serves no adapter with whole tensors beside it",
    }.items():
        assert told in hints(preset, words)[1]
    assert hints(preset, "adapter.targets=q,up") == [base]
    stretched = hints(preset, "model.rope_theta=5e6", "adapter.also_train=norms")
    assert "also_train=[" not in " ".join(stretched)
