import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from sppo.config import ModelConfig, RopeScaling, RunConfig
from sppo.config.loading import check_run
from sppo.config.problems import ConfigError
from sppo.config.run import (
    ActivationsConfig,
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    SequenceConfig,
    TrainConfig,
)
from sppo.config.yaml_file import parse_yaml, read_yaml
from tests.conftest import succeed

SHAPE = {"vocab_size": 8, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_size": 64}
SHIPPED = sorted(Path(__file__).parents[2].glob("configs/run/*.yaml"))


def messages(section, **values):
    with pytest.raises(ValidationError) as caught:
        section(**values)
    return {".".join(map(str, e["loc"])): e["msg"] for e in caught.value.errors()}


# Models


def test_heads_are_derived():
    model = ModelConfig(**SHAPE)
    assert (model.num_kv_heads, model.head_size) == (4, 8)
    assert (model.kv_heads, model.head_dim, model.group_size) == (4, 8, 1)
    grouped = ModelConfig(**SHAPE, num_kv_heads=2, head_size=6)
    assert (grouped.kv_heads, grouped.head_dim, grouped.group_size) == (2, 6, 2)


def test_derived_and_written_out_are_the_same_model():
    assert ModelConfig(**SHAPE) == ModelConfig(**SHAPE, num_kv_heads=4, head_size=8)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_heads": 5}, "hidden_size 32 is not a multiple of num_heads 5"),
        ({"num_heads": 64}, "hidden_size 32 is not a multiple of num_heads 64"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": 8}, "num_heads 4 is not a multiple of num_kv_heads 8"),
        ({"head_size": 7}, "head_size 7 is odd"),
        ({"position": "learned"}, "learned positions need max_positions"),
        (
            {"position": "learned", "max_positions": 8, "rope_scaling": {"type": "linear"}},
            "rope_scaling belongs to rotary positions",
        ),
    ],
)
def test_fields_that_do_not_fit_together(fields, says):
    assert says in messages(ModelConfig, **{**SHAPE, **fields})[""]


def test_an_odd_head_is_no_matter_for_learned_positions():
    ModelConfig(**SHAPE, head_size=7, position="learned", max_positions=8)


def test_fields_that_do_not_fit_together_are_all_told():
    text = messages(
        ModelConfig, **{**SHAPE, "num_heads": 5, "num_kv_heads": 2, "position": "learned"}
    )[""]
    assert text.count(";") == 2


def test_a_derived_field_repeats_no_fault():
    assert messages(ModelConfig, **{**SHAPE, "num_heads": 0}).keys() == {"num_heads"}
    assert messages(ModelConfig, **{**SHAPE, "num_heads": "x"}).keys() == {"num_heads"}
    assert messages(ModelConfig, **{**SHAPE, "num_heads": -4}).keys() == {"num_heads"}


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "mlp_size",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "x", [1]])
def test_counts_are_whole_numbers_of_at_least_one(key, value):
    assert any(path.startswith(key) for path in messages(ModelConfig, **{**SHAPE, key: value}))


@pytest.mark.parametrize("key", ["norm_eps", "rope_theta", "init_std"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True])
def test_scales_are_positive_and_finite(key, value):
    assert key in messages(ModelConfig, **{**SHAPE, key: value})


def test_windows_of_layers():
    model = ModelConfig(**SHAPE, sliding_window="1Ki", sliding_window_first_layer=1)
    assert [model.window_of(layer) for layer in range(2)] == [None, 1024]


# Rotary scaling


def test_scaling_needs_the_length_before():
    assert RopeScaling(type="linear", factor=2).original_max_positions is None
    for kind in ("llama3", "yarn"):
        assert "original_max_positions" in messages(RopeScaling, type=kind, factor=2)[""]
        RopeScaling(type=kind, factor=2, original_max_positions="8Ki")


def test_scaling_factors():
    assert "factor" in messages(RopeScaling, type="linear", factor=0.5)
    given = {"type": "llama3", "original_max_positions": 64}
    text = messages(RopeScaling, **given, low_freq_factor=4, high_freq_factor=4)[""]
    assert "low_freq_factor must be below high_freq_factor" in text
    yarn = {"type": "yarn", "original_max_positions": 64}
    text = messages(RopeScaling, **yarn, beta_fast=1, beta_slow=32)[""]
    assert "beta_fast 1 is below beta_slow 32" in text
    RopeScaling(**yarn, beta_fast=2, beta_slow=2)
    for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        assert key in messages(RopeScaling, **given, **{key: 0})


# The other sections


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (DataConfig, {"tokens": ""}),
        (DataConfig, {"tokens": 5}),
        (DataConfig, {"tokens": "t", "samples": "sentences"}),
        (SequenceConfig, {"length": 0}),
        (SequenceConfig, {"length": 64, "longer": "pad"}),
        (SequenceConfig, {"length": 64, "alignment": 0}),
        (SequenceConfig, {"length": 64, "boundaries": [0, -1, 64]}),
        (SequenceConfig, {"length": 64, "boundaries": [0, None, 64]}),
        (SequenceConfig, {"length": 64, "boundaries": "0,64"}),
        (OptimizerConfig, {"lr": -1}),
        (OptimizerConfig, {"lr": float("nan")}),
        (OptimizerConfig, {"betas": [0.9]}),
        (OptimizerConfig, {"betas": [0.9, 1.0]}),
        (OptimizerConfig, {"betas": [0.9, 0.95, 0.99]}),
        (OptimizerConfig, {"eps": 0}),
        (OptimizerConfig, {"clip_norm": -1}),
        (OptimizerConfig, {"final_lr_ratio": 1.1}),
        (OptimizerConfig, {"warmup_steps": -1}),
        (TrainConfig, {"steps": True}),
        (TrainConfig, {"samples_per_step": 0}),
        (TrainConfig, {"tokens_per_step": 0}),
        (TrainConfig, {"seed": -1}),
        (TrainConfig, {"dtype": "fp16"}),
        (TrainConfig, {"nonfinite": "ignore"}),
        (CheckpointConfig, {"every": -1}),
        (CheckpointConfig, {"keep": 0}),
        (ActivationsConfig, {"offload_ratio": -0.1}),
        (ActivationsConfig, {"offload_ratio": True}),
        (ActivationsConfig, {"disk_memory": "lots"}),
    ],
)
def test_values_out_of_range(section, values):
    messages(section, **values)


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "true", "false"])
def test_truth_values_may_be_written_as_words(word):
    assert DataConfig(tokens="t", shuffle=word).shuffle is (word in ("on", "yes", "true"))


def test_sections_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 5


# Schema


def accepts(schema, value, root):
    """Whether ``value`` satisfies ``schema``; fails on a keyword it does not know."""
    checks = {
        "anyOf": lambda subs: any(accepts(sub, value, root) for sub in subs),
        "$ref": lambda ref: accepts(root["$defs"][ref.rpartition("/")[2]], value, root),
        "type": lambda kind: of_type(value, kind),
        "enum": lambda choices: value in choices,
        "const": lambda choice: value == choice,
        "minimum": lambda least: not number(value) or value >= least,
        "maximum": lambda most: not number(value) or value <= most,
        "exclusiveMinimum": lambda least: not number(value) or value > least,
        "exclusiveMaximum": lambda most: not number(value) or value < most,
        "minLength": lambda least: not isinstance(value, str) or len(value) >= least,
        "minItems": lambda least: not isinstance(value, list) or len(value) >= least,
        "maxItems": lambda most: not isinstance(value, list) or len(value) <= most,
        "pattern": lambda text: not isinstance(value, str) or re.search(text, value) is not None,
        "items": lambda sub: (
            not isinstance(value, list) or all(accepts(sub, item, root) for item in value)
        ),
        "prefixItems": lambda subs: (
            not isinstance(value, list)
            or all(accepts(sub, item, root) for sub, item in zip(subs, value, strict=False))
        ),
        "required": lambda keys: not isinstance(value, dict) or set(keys) <= value.keys(),
        "properties": lambda subs: (
            not isinstance(value, dict)
            or all(accepts(subs[key], value[key], root) for key in value.keys() & subs.keys())
        ),
        "additionalProperties": lambda allowed: (
            allowed or not isinstance(value, dict) or value.keys() <= schema["properties"].keys()
        ),
    }
    said = {key: sub for key, sub in schema.items() if key not in ("title", "description")}
    said.pop("default", None)
    said.pop("$defs", None)
    assert said.keys() <= checks.keys(), said.keys() - checks.keys()
    return all(checks[key](sub) for key, sub in said.items())


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def of_type(value, kind):
    return {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": number(value) and float(value).is_integer(),
        "number": number(value),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]


@pytest.fixture(scope="module")
def schema():
    return json.loads(succeed("config", "schema"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_schema_takes_the_shipped_run_files(schema, path):
    assert accepts(schema, read_yaml(path), schema)


def test_the_schema_takes_a_run_written_out_in_full(schema):
    shown = parse_yaml(succeed("config", "show", SHIPPED[0]), source="shown")
    assert accepts(schema, shown, schema)


ESSENTIALS = {"model": {"preset": "tiny"}, "data": {"tokens": "t"}, "sequence": {"length": "32Ki"}}


@pytest.mark.parametrize(
    ("section", "key", "good", "bad"),
    [
        ("sequence", "length", "4Mi", "4MI"),
        ("sequence", "num_subsequences", "auto", "many"),
        ("sequence", "boundaries", [0, "5Ki", 9], [0, "x"]),
        ("sequence", "partition", "length", "lenght"),
        ("activations", "host_memory", "2GiB", True),
        ("activations", "offload_ratio", 0.5, 1.5),
        ("optimizer", "lr", 1e-3, -1),
        ("train", "steps", 5, 0),
        ("train", "stesp", None, 5),
        ("model", "rope_scaling", {"type": "linear"}, {"type": "quadratic"}),
        ("data", "tokens", "t", ""),
    ],
)
def test_the_schema_knows_values_apart(schema, section, key, good, bad):
    def run(value):
        return {**ESSENTIALS, section: {**ESSENTIALS.get(section, {}), key: value}}

    assert good is None or accepts(schema, run(good), schema)
    assert not accepts(schema, run(bad), schema)


def test_every_key_is_described_or_speaks_for_itself(schema):
    described = schema["$defs"]["TrainConfig"]["properties"]["max_nonfinite_steps"]
    assert "consecutive" in described["description"]
    assert RunConfig.model_fields.keys() == schema["properties"].keys()


@pytest.mark.parametrize(
    ("section", "keys", "path"),
    [
        ("model", {"num_layers": 100_000_000}, "model.num_layers"),
        ("model", {"vocab_size": 10**18}, "model.vocab_size"),
        ("model", {"num_heads": 10**400}, "model.num_heads"),
        ("model", {"norm_eps": 1e300}, "model.norm_eps"),
        ("model", {"rope_theta": 0.5}, "model.rope_theta"),
        ("sequence", {"length": 10**18}, "sequence.length"),
        ("sequence", {"length": "9999999Ti"}, "sequence.length"),
        ("sequence", {"num_subsequences": 10**18}, "sequence.num_subsequences"),
        ("parallel", {"timeout_s": 1e15}, "parallel.timeout_s"),
        ("parallel", {"timeout_s": 1e10}, "parallel.timeout_s"),
        ("parallel", {"timeout_s": 1e-9}, "parallel.timeout_s"),
        ("parallel", {"data_parallel_degree": 1 << 40}, "parallel.data_parallel_degree"),
        ("optimizer", {"warmup_steps": 10**399}, "optimizer.warmup_steps"),
        ("optimizer", {"lr": 1e300}, "optimizer.lr"),
        ("train", {"steps": 10**20}, "train.steps"),
        ("train", {"sequences_per_step": 1 << 20}, "train.sequences_per_step"),
        ("train", {"samples_per_step": 1 << 40}, "train.samples_per_step"),
        ("train", {"tokens_per_step": 1 << 40}, "train.tokens_per_step"),
        ("train", {"seed": 1 << 64}, "train.seed"),
        ("checkpoint", {"keep": 10**400}, "checkpoint.keep"),
    ],
)
def test_numbers_beyond_any_use_are_refused_by_their_key(section, keys, path):
    raw = {
        "model": {"preset": "llama-3.2-1b"},
        "data": {"tokens": "t"},
        "sequence": {"length": "1Ki"},
    }
    raw[section] = {**raw.get(section, {}), **keys}
    with pytest.raises(ConfigError) as caught:
        check_run(raw, source="run.yaml")
    assert [problem.path for problem in caught.value.problems] == [path]
    assert len(str(caught.value)) < 400


def test_yarn_needs_frequencies_that_differ():
    scaling = {"type": "yarn", "factor": 2.0, "original_max_positions": 64}
    model = {"preset": "llama-3.2-1b", "rope_theta": 1, "rope_scaling": scaling}
    raw = {"model": model, "data": {"tokens": "t"}, "sequence": {"length": 128}}
    with pytest.raises(ConfigError, match="yarn needs rope_theta above 1"):
        check_run(raw, source="run.yaml")
