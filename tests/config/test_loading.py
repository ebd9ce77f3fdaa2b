import json
from pathlib import Path

import numpy as np
import pytest

from sppo.config import ConfigError, RunConfig, check_run, load_run
from sppo.config.model.presets import PRESETS
from tests.config.test_huggingface import config_json
from tests.conftest import SCREEN_LINES

MODEL = {"preset": "tiny-test"}
RUN = {"model": MODEL, "data": {"tokens": "tok"}, "sequence": {"length": 64}}
SHIPPED = sorted(Path(__file__).parents[2].glob("configs/run/*.yaml"))


def problems(raw):
    """``path: rule`` of every problem."""
    with pytest.raises(ConfigError) as caught:
        check_run(raw, source="run.yaml")
    return {problem.path: problem.rule for problem in caught.value.problems}


def load(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_run(path, overrides)


ESSENTIALS = "model: {preset: tiny-test}\ndata: {tokens: tok}\nsequence: {length: 64}\n"


def essential(tmp_path, *overrides):
    return load(tmp_path, ESSENTIALS, *overrides)


def override_problems(tmp_path, *overrides):
    with pytest.raises(ConfigError) as caught:
        essential(tmp_path, *overrides)
    return {problem.path: problem for problem in caught.value.problems}


# All problems at once


def test_every_problem_has_path_value_rule_and_the_nearest_spelling():
    raw = {
        "model": {"preset": "llama-3.2-1", "num_layers": 0},
        "data": {"tokens": "tok", "shufle": True, "isolate_documents": "maybe"},
        "validation": {"every": 1, "sets": {"own": {"tokens": "tok", "max_length": 5}}},
        "sequence": {"length": "32KI", "num_subsequences": 0, "partition": "flop"},
        "optimiser": {"lr": 1},
        "lr": 3e-4,
        "activations": {"policy": "retian", "offload_ratio": 1.5, "host_memory": "much"},
        "train": {"dtype": "f32", "steps": 0, "length": 5, "seed": 1.5},
        "checkpoint": 5,
        "hardware": "me",
    }
    found = problems(raw)
    assert found == {
        "optimiser": "unknown key. Did you mean 'optimizer'?",
        "lr": "unknown key. Did you mean optimizer.lr?",
        "model.preset": "no such preset. Did you mean 'llama-3.2-1b'?",
        "data.isolate_documents": "must be a valid boolean",
        "data.shufle": "unknown key. Did you mean 'shuffle'?",
        "sequence.length": "'32KI' is not a size; write one such as 32Ki, 2GiB or 4096",
        "validation.sets.own.max_length": "unknown key. Did you mean 'length'?",
        "sequence.num_subsequences": "neither auto nor valid: must be greater than or equal to 1",
        "sequence.partition": "not one of auto, flops, length. Did you mean 'flops'?",
        "activations.policy": "not one of auto, retain, keep_attention, recompute, offload_all, "
        "sppo, hybrid. Did you mean 'retain'?",
        "activations.offload_ratio": "neither auto nor valid: must be less than or equal to 1",
        "activations.host_memory": "neither auto nor valid: 'much' is not a size; write one such "
        "as 32Ki, 2GiB or 4096",
        "train.dtype": "not one of bf16, fp32. Did you mean 'fp32'?",
        "train.steps": "must be greater than or equal to 1",
        "train.seed": "must be a valid integer, got a number with a fractional part",
        "train.length": "unknown key. Did you mean sequence.length?",
        "checkpoint": "a section is a mapping of keys to values",
        "hardware": "a section is a mapping of keys to values or auto; a preset is named by "
        "hardware.preset",
    }


_HERE = "unknown key. Here it is parallel.sequence_parallel_degree, with sequence_parallel="


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("parallel.context_parallel_degree", 8, f"{_HERE}ulysses."),
        ("parallel.tensor_parallel_size", 8, f"{_HERE}megatron."),
        ("optimizer.offload", True, "unknown key. Here it is state.optimizer=host."),
        *(
            ("optimizer.betas", betas, "must be a list of 2 numbers, such as [0.9, 0.95]")
            for betas in (0.9, [0.9], [0.9, 0.95, 0.99])
        ),
        ("sequence.boundaries", 5, "must be a list of cuts, such as [0, 5000, 16384]"),
        ("train.dtype", "float32", "not one of bf16, fp32."),
        *(
            ("model.preset", preset, "no such preset. Presets: gpt-7b, ")
            for preset in (["tiny"], {"tiny": 1}, 5, True, "", "zzz")
        ),
        ("model.from_hf", "/no/such/directory", "/no/such/directory is not a directory"),
        ("data.tokens", "~/x", "~ stands for nothing in a run file: write the whole path"),
        ("data.eval_tokens", "~/x", "~ stands for nothing in a run file: write the whole path"),
        ("train.output", "~/x", "~ stands for nothing in a run file: write the whole path"),
        ("train.output", "", "String should have at least 1 character"),
    ],
)
def test_the_rule_of_a_value(key, value, rule):
    section, _, name = key.partition(".")
    keys = {**RUN.get(section, {}), name: value}
    if name == "from_hf":
        del keys["preset"]
    found = problems({**RUN, section: keys})
    assert found.keys() == {key}
    assert found[key].startswith(rule)


def test_the_text_lists_path_value_and_rule():
    with pytest.raises(ConfigError) as caught:
        check_run({**RUN, "train": {"dtype": "f32"}}, source="my.yaml")
    first, second = str(caught.value).splitlines()
    assert first == "my.yaml has 1 problem"
    assert second.split(maxsplit=2) == [
        "train.dtype",
        "'f32'",
        "not one of bf16, fp32. Did you mean 'fp32'?",
    ]


def test_a_hundred_problems_fit_one_screen_and_are_all_there():
    raw = {**RUN, "train": {f"key{i}": "x" * 1000 for i in range(100)}}
    with pytest.raises(ConfigError) as caught:
        check_run(raw, source="run.yaml")
    assert len(caught.value.problems) == 100
    lines = str(caught.value).splitlines()
    assert len(lines) < SCREEN_LINES
    assert lines[-1] == "  and 80 more; sppo config check --json lists all"
    assert max(map(len, lines)) < 350


# Sections


def test_an_empty_file_says_what_every_run_needs(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "")
    assert [problem.path for problem in caught.value.problems] == [
        "model",
        "data.tokens",
        "sequence.length",
    ]
    assert "preset, or from_hf, or the fields vocab_size" in str(caught.value)


def test_some_fields_of_a_model_are_missed_one_by_one():
    assert problems({**RUN, "model": {"vocab_size": 8, "num_heads": 2}}).keys() == {
        "model.hidden_size",
        "model.num_layers",
        "model.mlp_size",
    }


def test_null_sections_are_as_if_left_out(tmp_path):
    plain = essential(tmp_path)
    names = [name for name in RunConfig.model_fields if name not in RUN]
    nulls = load(tmp_path, ESSENTIALS + "".join(f"{name}:\n" for name in names))
    assert nulls == plain
    assert nulls.hardware == "auto"


def test_keys_that_are_no_words():
    found = problems({**RUN, 1: 2, None: 3, "train": {1: 2, "steps": 3}})
    assert found.keys() == {"1", "None", "train.1"}


def test_a_preset_stands_in_for_a_directory_that_is_not_there(tmp_path):
    model = {"preset": "tiny", "from_hf": str(tmp_path / "model")}
    planned = load_run({**RUN, "model": model}).model
    assert planned.hidden_size == PRESETS["tiny"]["hidden_size"]
    (tmp_path / "model").mkdir()
    config = config_json("qwen3", hidden_size=96, num_attention_heads=4, head_dim=16)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    trained = load_run({**RUN, "model": model}).model
    assert (trained.hidden_size, trained.num_heads) == (96, 4)


def test_an_override_takes_the_place_of_what_says_the_same_in_another_way():
    run = {**RUN, "model": {"from_hf": "nowhere"}, "train": {"epochs": 2}}
    found = load_run(run, ["model.preset=tiny", "train.steps=7"])
    assert (found.model.from_hf, found.train.epochs, found.train.steps) == (None, None, 7)
    with pytest.raises(ConfigError, match="leave one of the two keys out"):
        load_run(RUN, ["train.steps=7", "train.epochs=2"])


# Overrides


def test_overrides_are_typed_as_yaml(tmp_path):
    run = essential(
        tmp_path,
        "optimizer.lr=5",
        "optimizer.lr=1e-3",  # the last counts
        "optimizer.betas=[0.8, 0.9]",
        "data.shuffle=false",
        "data.eval_tokens=null",
        "sequence.length=1Ki",
        "sequence.boundaries=[0,5,9,1Ki]",
        "activations.host_memory=2GiB",
        "train={steps: 7, seed: 3}",
        "train.output=a=b",
    )
    assert run.optimizer.lr == 1e-3
    assert run.optimizer.betas == (0.8, 0.9)
    assert run.data.shuffle is False
    assert run.sequence.boundaries == (0, 5, 9, 1024)
    assert run.activations.host_memory == 2 << 30
    assert (run.train.steps, run.train.seed, run.train.output) == (7, 3, "a=b")


def test_overrides_reach_sections_the_file_leaves_out_or_at_auto(tmp_path):
    text = ESSENTIALS + "hardware: auto\ntrain:\noptimizer: {lr: much}\n"
    words = ("hardware.nodes=4", "train.steps=2", "model.rope_scaling.type=linear")
    run = load(tmp_path, text, *words, "optimizer.lr=1e-3")  # which puts the file right
    assert (run.hardware.nodes, run.train.steps, run.optimizer.lr) == (4, 2, 1e-3)
    assert run.model.rope_scaling.type == "linear"


def test_wrong_overrides_are_all_reported(tmp_path):
    found = override_problems(
        tmp_path,
        "word",
        "=3",
        ".=3",
        "train..steps=3",
        "sequence.length.x=3",
        "optimizer.lr=[",
        "trian.steps=3",
        "train.stesp=3",
        "lr=3",
    )
    written = "an override is written section.key=value"
    assert found["word"].rule == written
    assert found["=3"].rule == written
    assert found[".=3"].rule == written
    assert found["train..steps=3"].rule == written
    assert "sequence.length is a value" in found["sequence.length.x"].rule
    assert found["optimizer.lr"].value == "'['"
    assert found["trian"].rule == "unknown key. Did you mean 'train'?"
    assert found["train.stesp"].rule == "unknown key. Did you mean 'steps'?"
    assert found["lr"].rule == "unknown key. Did you mean optimizer.lr?"


# What loading leaves alone


def test_given_mappings_are_not_changed():
    raw = {**RUN, "model": {**MODEL, "num_heads": 8}}
    before = json.dumps(raw)
    check_run(raw, source="run.yaml")
    assert json.dumps(raw) == before


# Whatever is written


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_run_files_are_right(path):
    load_run(path)


def test_values_of_numpy_and_paths_are_taken(tmp_path):
    changes = {"sequence.length": np.int64(64), "sequence.boundaries": np.array([0, 16, 64])}
    run = load_run({**RUN, "data": {"tokens": tmp_path}}, changes | {"train.output": tmp_path})
    assert (run.sequence.length, run.sequence.boundaries) == (64, (0, 16, 64))
    assert run.data.tokens == run.train.output == str(tmp_path)


def test_a_run_is_changed():
    run = load_run(RUN, "train.steps=3")
    assert load_run(run, {"train.steps": 4}) == load_run(RUN, ["train.steps=4"])


@pytest.mark.parametrize(
    ("source", "overrides", "said"),
    [(None, (), "path of a run file"), (RUN, None, "overrides=None"), (RUN, [3], "key=value")],
)
def test_what_is_no_run_is_refused(source, overrides, said):
    with pytest.raises(TypeError, match=said):
        load_run(source, overrides)
