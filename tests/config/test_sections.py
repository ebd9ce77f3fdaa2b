import pytest
from pydantic import ValidationError

from sppo.config import ModelConfig, RopeScaling
from sppo.config.loading import check_run
from sppo.config.problems import ConfigError
from sppo.config.run import (
    DataConfig,
    TrainConfig,
)

SHAPE = {"vocab_size": 8, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_size": 64}


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


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "true", "false"])
def test_truth_values_may_be_written_as_words(word):
    assert DataConfig(tokens="t", shuffle=word).shuffle is (word in ("on", "yes", "true"))


def test_sections_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 5


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
