"""Rules about several keys: what goes together, and the words for what does not."""

from typing import get_args

import pytest

from sppo.config import ConfigError, check_run
from sppo.config.run import Schedule
from sppo.schedule.orders import names


def problems(**sections):
    """``path value rule`` of every problem of a run of the smallest model."""
    raw = {
        "model": {"preset": "tiny-test"},
        "data": {"tokens": "tok"},
        "sequence": {"length": 64},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    try:
        check_run(raw, source="run.yaml")
    except ConfigError as error:
        return [f"{problem.path} {problem.value} {problem.rule}" for problem in error.problems]
    return []


WINDOW = {"sliding_window": 16}
LEARNED = {"position": "learned", "max_positions": 64}
DOCUMENTS = {"data": {"samples": "documents"}}
TWO_REPLICAS = {"data_parallel_degree": 2}


@pytest.mark.parametrize(
    "sections",
    [
        *({"sequence": {"boundaries": cuts}} for cuts in ([0, 64], [0, 1, 2, 64], [0, 63, 64])),
        {"sequence": {"boundaries": [0, 63, 64], "num_subsequences": 2}},
        {"sequence": {"num_subsequences": 64}},
        {"model": {"family": "mistral"}},
        {"model": {**WINDOW, "layer_types": ["full", "sliding"]}},
        {"model": LEARNED},
        {"model": {"max_positions": 32}},  # rotary positions have no table
        *({"parallel": {f"{kind}_parallel_degree": 128}} for kind in ("data", "pipeline")),
        {"parallel": {"zero": 3, **TWO_REPLICAS}},
        *({"parallel": {"multiplexed": word}} for word in ("auto", "on", "off")),
        *(
            {"parallel": {"virtual_stages": 2, "schedule": schedule}}
            for schedule in ("auto", "looped_bfs", "interleaved_1f1b", "sppo_msp")
        ),
        {"parallel": {"virtual_stages": 2, "multiplexed": "on"}},
        {"parallel": {"virtual_stages": "auto", "schedule": "gpipe"}},
        {"parallel": {"virtual_stages": 1, "multiplexed": "on"}},
        # What a run file alone cannot tell: a CPU has no host tier, which training refuses.
        {"activations": {"tier": "host"}},
        {"state": {"optimizer": "host"}},
        {"optimizer": {"schedule": "wsd", "warmup_steps": "3%", "decay_steps": "97%"}},
        {"optimizer": {"warmup_steps": 200, "schedule_steps": 100}},
        {**DOCUMENTS, "train": {"samples_per_step": 2}},
        {**DOCUMENTS, "train": {"samples_per_step": 1}, "sequence": {"longer": "drop"}},
        {**DOCUMENTS, "train": {"tokens_per_step": 64}, "sequence": {"longer": "refuse"}},
        {**DOCUMENTS, "train": {"tokens_per_step": "4Ki"}, "sequence": {"num_subsequences": 2}},
        {**DOCUMENTS, "train": {"tokens_per_step": 128}, "parallel": TWO_REPLICAS},
        {**DOCUMENTS, "train": {"samples_per_step": 2}, "parallel": TWO_REPLICAS},
        {**DOCUMENTS, "train": {"samples_per_step": 2}, "parallel": {"zero": 3}},
        {
            "data": {"samples": "documents", "isolate_documents": True},
            "train": {"samples_per_step": 2},
        },
    ],
)
def test_what_goes_together(sections):
    assert problems(**sections) == []


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        *(
            (
                {"sequence": {"boundaries": cuts}},
                f"sequence.boundaries {cuts} must rise from 0 to sequence.length = 64, "
                "e.g. [0, 32, 64]",
            )
            for cuts in (
                *([], [0], [0, 32], [1, 64], [0, 40, 32, 64], [0, 32, 32, 64]),
                *([0, 64, 65], [64, 0]),
            )
        ),
        (
            {"sequence": {"boundaries": [0, 5, 64], "num_subsequences": 3}},
            "sequence.num_subsequences 3 boundaries cut 2 subsequences",
        ),
        (
            {"sequence": {"num_subsequences": 65}},
            "sequence.num_subsequences 65 more than the 64 tokens",
        ),
        (
            {"model": {"family": "gpt2"}},
            "model.family gpt2 does not compute this model: num_kv_heads is 2, needs 4; ",
        ),
        (
            {"model": LEARNED, "sequence": {"length": 65}},
            "sequence.length 65 longer than the 64 learned positions",
        ),
        (
            {"parallel": {"multiplexed": "on", "schedule": "gpipe"}},
            "parallel.multiplexed on parallel.schedule=gpipe shards no units",
        ),
        (
            {"parallel": {"multiplexed": "off", "schedule": "sppo_msp"}},
            "parallel.multiplexed off parallel.schedule=sppo_msp is multiplexed",
        ),
        (
            {"parallel": {"virtual_stages": 2, "schedule": "sppo"}},
            "parallel.virtual_stages 2 parallel.schedule=sppo holds one stage on a rank; write "
            "auto or",
        ),
        (
            {"parallel": {"virtual_stages": 2, "pipeline_parallel_degree": 2}},
            "parallel.virtual_stages 2 so many stages on each of 2 pipeline ranks need a layer "
            "each, and there are 2",
        ),
        (
            {**DOCUMENTS, "train": {}},
            "train.samples_per_step (missing) data.samples=documents needs it or "
            "train.tokens_per_step; write one",
        ),
        (
            {**DOCUMENTS, "train": {"samples_per_step": 3, "tokens_per_step": 64}},
            "train.tokens_per_step 64 train.samples_per_step=3 says",
        ),
        (
            {**DOCUMENTS, "train": {"samples_per_step": 3, "sequences_per_step": 2}},
            "train.sequences_per_step 2 counts sequences of a stream",
        ),
        (
            {**DOCUMENTS, "train": {"samples_per_step": 3}, "sequence": {"boundaries": [0, 64]}},
            "sequence.boundaries [0, 64] data.samples=documents has samples of many lengths",
        ),
        (
            {
                **DOCUMENTS,
                "train": {"samples_per_step": 3},
                "parallel": {"data_parallel_degree": 4},
            },
            "train.samples_per_step 3 fewer than the 4 replicas",
        ),
        (
            {
                **DOCUMENTS,
                "train": {"samples_per_step": 3},
                "parallel": {**TWO_REPLICAS, "zero": 2},
            },
            "parallel.zero 2 shards gradients over 2 data-parallel replicas",
        ),
        (
            {**DOCUMENTS, "train": {"tokens_per_step": 63}},
            "train.tokens_per_step 63 must hold a sample of sequence.length = 64 tokens; raise it "
            "to at least 64",
        ),
        (
            {**DOCUMENTS, "train": {"tokens_per_step": 127}, "parallel": TWO_REPLICAS},
            "train.tokens_per_step 127 must hold a sample of sequence.length = 64 tokens for each "
            "of 2 replicas; raise it to at least 128",
        ),
        ({"train": {"samples_per_step": 3}}, "train.samples_per_step 3 counts samples"),
        ({"train": {"tokens_per_step": 640}}, "train.tokens_per_step 640 counts samples"),
        (
            {"optimizer": {"decay_steps": 5}},
            "optimizer.decay_steps 5 is of schedule wsd, and optimizer.schedule=cosine decays",
        ),
        (
            {"optimizer": {"schedule": "linear", "decay": "sqrt"}},
            "optimizer.decay sqrt is of schedule wsd",
        ),
        (
            {"optimizer": {"schedule": "wsd"}},
            "optimizer.decay_steps (missing) optimizer.schedule=wsd needs it",
        ),
        (
            {"optimizer": {"schedule": "wsd", "warmup_steps": "3%", "decay_steps": 98}},
            "optimizer.decay_steps 98 98 steps after 3 of warm-up are more than train.steps=100; "
            "lower it to at most 97",
        ),
        (
            {"optimizer": {"warmup_steps": "3 steps"}},
            "optimizer.warmup_steps '3 steps' write a number of steps, 0 to 1000000000000, or a "
            "share",
        ),
        ({"optimizer": {"warmup_steps": "100.5%"}}, "optimizer.warmup_steps '100.5%' write"),
        ({"sequence": {"longer": "drop"}}, "sequence.longer drop a stream is cut into sequences"),
    ],
)
def test_what_contradicts_the_rest(sections, told):
    (problem,) = problems(**sections)
    assert problem.startswith(told)


EXPERTS = {"count": 4, "per_token": 2, "mlp_size": 16}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"model": {"experts": EXPERTS}, "parallel": {"sequence_parallel": "megatron"}},
            "parallel.sequence_parallel megatron shards the weights of layers, but not those of "
            "model.experts; write ulysses",
        ),
        (
            {"model": {"qk_norm": "all"}, "parallel": {"sequence_parallel": "megatron"}},
            "parallel.sequence_parallel megatron gives each device some of the heads, and "
            "model.qk_norm=all norms q and k over all of them; write ulysses",
        ),
        ({"routing": {"z_loss": 1e-3}}, "routing.z_loss 0.001 belongs to model.experts"),
        (
            {"model": {"experts": EXPERTS}, "routing": {"bias_update": 1e-3}},
            "routing.bias_update 0.001 updates the biases by which experts are chosen; write "
            "model.experts.choice_bias=true",
        ),
        (
            {"model": {"experts": EXPERTS}, "adapter": {"rank": 2, "targets": "q,up"}},
            "adapter.targets ['q', 'up'] gate, up and down are those of an MLP that all tokens",
        ),
        (
            {
                "model": {"experts": {**EXPERTS, "dense_layers": 1}},
                "adapter": {"rank": 2, "targets": "up", "layers": [1]},
            },
            "adapter.targets ['up'] gate, up and down are those of an MLP that all tokens",
        ),
        (
            {"model": {"sliding_window": 4, "sliding_window_first_layer": 9}},
            "model  sliding_window_first_layer 9 is no number of the 2 layers",
        ),
    ],
)
def test_what_models_of_today_refuse(sections, told):
    assert [problem for problem in problems(**sections) if problem.startswith(told)]


HYBRID = {
    "layer_types": ["linear", "full"],
    "linear_attention": {"key_heads": 2, "value_heads": 4, "key_size": 8, "value_size": 8},
}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"parallel": {"sequence_parallel": "megatron"}},
            "parallel.sequence_parallel megatron shards the weights of layers, but not those of "
            "model.linear_attention; write ulysses",
        ),
        (
            {"activations": {"input_every": 2}},
            "activations.input_every 2 runs a layer again for the input of the next, and layers "
            "with model.linear_attention",
        ),
        (
            {"adapter": {"rank": 2, "targets": "q,up", "layers": [0]}},
            "adapter.targets ['q', 'up'] q, k, v and o are those of attention, and all layers",
        ),
        ({"adapter": {"rank": 2, "targets": "q", "layers": "0-1"}}, None),
        ({"adapter": {"rank": 2, "layers": [0]}}, None),
        ({"parallel": {"sequence_parallel": "ulysses", "virtual_stages": 2}}, None),
    ],
)
def test_what_linear_attention_refuses(sections, told):
    found = problems(**{"model": HYBRID, **sections})
    assert len(found) == (told is not None)
    assert told is None or found[0].startswith(told)


def test_broken_rules_of_several_sections_are_all_told():
    found = problems(
        sequence={"num_subsequences": 65},
        parallel={"schedule": "gpipe", "multiplexed": "on"},
        model={"family": "gpt2"},
    )
    assert len(found) == 3


def test_every_schedule_there_is_may_be_written_and_no_other():
    assert set(get_args(Schedule)) == {"auto", *names.schedule_names()}
    (problem,) = problems(parallel={"schedule": "zb-h1"})
    assert problem.startswith("parallel.schedule 'zb-h1' not one of")
    assert problem.endswith("Did you mean 'zb_h1'?")
