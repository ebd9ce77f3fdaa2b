import pytest
from pydantic import ValidationError

from sppo.config import ModelConfig, RopeScaling
from sppo.config.loading import check_run
from sppo.config.problems import ConfigError
from sppo.config.run import DataConfig, TrainConfig

SHAPE = {"vocab_size": 8, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_size": 64}
LLAMA3 = {"type": "llama3", "original_max_positions": 64}
YARN = {"type": "yarn", "original_max_positions": 64}
LEARNED = {"position": "learned", "max_positions": 8}


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
    ModelConfig(**SHAPE, **LEARNED, head_size=7)  # an odd head matters to rotary positions only


@pytest.mark.parametrize(
    ("section", "fields", "says"),
    [
        (ModelConfig, {"num_heads": 5}, "hidden_size 32 is not a multiple of num_heads 5"),
        (ModelConfig, {"num_heads": 64}, "hidden_size 32 is not a multiple of num_heads 64"),
        (ModelConfig, {"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        (ModelConfig, {"num_kv_heads": 8}, "num_heads 4 is not a multiple of num_kv_heads 8"),
        (ModelConfig, {"head_size": 7}, "7 dimensions of a head are rotated"),
        (ModelConfig, {"position": "learned"}, "learned positions need max_positions"),
        (ModelConfig, {**LEARNED, "rope_scaling": {"type": "linear"}}, "to rotary positions"),
        (ModelConfig, {"rope_theta": 1, "rope_scaling": YARN}, "yarn needs rope_theta above 1"),
        (RopeScaling, {"type": "llama3"}, "needs original_max_positions"),
        (RopeScaling, {"type": "yarn"}, "needs original_max_positions"),
        (RopeScaling, {**LLAMA3, "low_freq_factor": 4}, "must be below high_freq_factor"),
        (RopeScaling, {**YARN, "beta_fast": 1, "beta_slow": 32}, "1 is below beta_slow 32"),
    ],
)
def test_fields_that_do_not_fit_together(section, fields, says):
    shape = SHAPE if section is ModelConfig else {}
    assert says in messages(section, **{**shape, **fields})[""]


def test_fields_that_do_not_fit_together_are_all_told():
    text = messages(
        ModelConfig, **{**SHAPE, "num_heads": 5, "num_kv_heads": 2, "position": "learned"}
    )[""]
    assert text.count(";") == 2


@pytest.mark.parametrize("heads", [0, "x", -4])
def test_a_derived_field_repeats_no_fault(heads):
    assert messages(ModelConfig, **{**SHAPE, "num_heads": heads}).keys() == {"num_heads"}


SIZES = [*SHAPE, "num_kv_heads", "head_size"]
SCALES = ["norm_eps", "rope_theta", "init_std"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in SIZES for value in (0, -1, 1.5, True, "x", [1])),
        *((key, value) for key in SCALES for value in (0, -1, float("inf"), float("nan"), True)),
    ],
)
def test_sizes_and_scales_of_models(key, value):
    assert any(path.startswith(key) for path in messages(ModelConfig, **{**SHAPE, key: value}))


def test_windows_of_layers():
    model = ModelConfig(**SHAPE, sliding_window="1Ki", layer_types=["full", "sliding"])
    assert [model.layer_type(layer).window for layer in range(2)] == [None, 1024]


def test_factors_of_scaling():
    assert RopeScaling(type="linear", factor=2).original_max_positions is None
    RopeScaling(**YARN, beta_fast=2, beta_slow=2)
    assert "factor" in messages(RopeScaling, type="linear", factor=0.5)
    for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        assert key in messages(RopeScaling, **LLAMA3, **{key: 0})


# The other sections


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "true", "false"])
def test_truth_values_may_be_written_as_words(word):
    assert DataConfig(tokens="t", shuffle=word).shuffle is (word in ("on", "yes", "true"))


def test_sections_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.num_layers", 100_000_000),
        ("model.vocab_size", 10**18),
        ("model.num_heads", 10**400),
        ("model.norm_eps", 1e300),
        ("model.rope_theta", 0.5),
        ("sequence.length", 10**18),
        ("sequence.length", "9999999Ti"),
        ("sequence.num_subsequences", 10**18),
        ("parallel.timeout_s", 1e15),
        ("parallel.timeout_s", 1e10),
        ("parallel.timeout_s", 1e-9),
        ("parallel.data_parallel_degree", 1 << 40),
        ("optimizer.warmup_steps", 10**399),
        ("optimizer.lr", 1e300),
        ("train.steps", 10**20),
        ("train.sequences_per_step", 1 << 20),
        ("train.samples_per_step", 1 << 40),
        ("train.tokens_per_step", 1 << 40),
        ("train.seed", 1 << 64),
        ("checkpoint.keep", 10**400),
    ],
)
def test_numbers_beyond_any_use_are_refused_by_their_key(key, value):
    raw = {"model": {"preset": "tiny"}, "data": {"tokens": "t"}, "sequence": {"length": "1Ki"}}
    section, _, name = key.partition(".")
    raw[section] = {**raw.get(section, {}), name: value}
    with pytest.raises(ConfigError) as caught:
        check_run(raw, source="run.yaml")
    assert [problem.path for problem in caught.value.problems] == [key]
    assert len(str(caught.value)) < 400
