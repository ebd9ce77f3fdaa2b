from typing import get_args

import pytest

from sppo.activations.policy import OFFLOADING_POLICIES, POLICIES
from sppo.config import ConfigError, check_run
from sppo.config.run import Schedule
from sppo.schedule.orders import names


def problems(**sections):
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
        return [(problem.path, problem.value, problem.rule) for problem in error.problems]
    return []


def only(**sections):
    (problem,) = problems(**sections)
    return problem


@pytest.mark.parametrize("cuts", [[0, 64], [0, 1, 2, 64], [0, 63, 64]])
def test_boundaries_that_tile(cuts):
    assert problems(sequence={"boundaries": cuts}) == []
    assert problems(sequence={"boundaries": cuts, "num_subsequences": len(cuts) - 1}) == []


@pytest.mark.parametrize(
    "cuts", [[], [0], [0, 32], [1, 64], [0, 40, 32, 64], [0, 32, 32, 64], [0, 64, 65], [64, 0]]
)
def test_boundaries_that_do_not_tile(cuts):
    path, value, rule = only(sequence={"boundaries": cuts})
    assert (path, value) == ("sequence.boundaries", str(cuts))
    assert rule == "must rise from 0 to sequence.length = 64, e.g. [0, 32, 64]"


def test_boundaries_of_another_number():
    path, value, rule = only(sequence={"boundaries": [0, 5, 64], "num_subsequences": 3})
    assert (path, value) == ("sequence.num_subsequences", "3")
    assert "2 subsequences" in rule


def test_more_pieces_than_tokens():
    assert problems(sequence={"num_subsequences": 64}) == []
    path, value, rule = only(sequence={"num_subsequences": 65})
    assert (path, value) == ("sequence.num_subsequences", "65")
    assert "64 tokens" in rule


def test_a_family_that_cannot_hold_the_model():
    path, value, rule = only(model={"family": "gpt2"})
    assert (path, value) == ("model.family", "gpt2")
    assert "mlp is swiglu, needs gelu or gelu_tanh" in rule
    assert "use another family, or null" in rule
    assert problems(model={"family": "mistral"}) == []


@pytest.mark.parametrize("partition", ["auto", "flops", "length", "cost_model"])
def test_every_partition_can_be_trained(partition):
    assert problems(sequence={"partition": partition}) == []


@pytest.mark.parametrize("kind", ["data", "pipeline", "sequence"])
def test_many_ranks(kind):
    for degree in (1, 2, 128):
        assert problems(parallel={f"{kind}_parallel_degree": degree}) == []


@pytest.mark.parametrize("mechanism", ["ulysses", "megatron"])
def test_sequence_parallelism(mechanism):
    assert problems(parallel={"sequence_parallel": mechanism}) == []


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_way_to_share_state_out(zero):
    assert problems(parallel={"zero": zero, "data_parallel_degree": 2}) == []


def test_schedules():
    assert problems(parallel={"schedule": "1f1b"}) == []
    ((path, value, rule),) = problems(parallel={"schedule": "zb-h1"})
    assert (path, value) == ("parallel.schedule", "'zb-h1'")
    assert rule.endswith("Did you mean 'zb_h1'?")


@pytest.mark.parametrize("multiplexed", ["auto", "on", "off"])
def test_pieces_of_units(multiplexed):
    assert problems(parallel={"pipeline_parallel_degree": 4, "multiplexed": multiplexed}) == []


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"multiplexed": "on", "schedule": "gpipe", "pipeline_parallel_degree": 2}, "gpipe"),
        ({"multiplexed": "off", "schedule": "sppo_msp"}, "sppo_msp is multiplexed"),
    ],
)
def test_pieces_of_units_that_contradict_the_rest(parallel, told):
    path, _, rule = only(parallel=parallel)
    assert path == "parallel.multiplexed"
    assert told in rule


def test_every_schedule_there_is_may_be_written_and_no_other():
    assert set(get_args(Schedule)) == {"auto", *names.schedule_names()}


@pytest.mark.parametrize("schedule", ["auto", "looped_bfs", "interleaved_1f1b", "sppo_msp"])
def test_virtual_stages(schedule):
    assert problems(parallel={"virtual_stages": 2, "schedule": schedule}) == []
    assert problems(parallel={"virtual_stages": 2, "multiplexed": "on"}) == []
    assert problems(parallel={"virtual_stages": "auto", "schedule": "gpipe"}) == []
    assert problems(parallel={"virtual_stages": 1, "multiplexed": "on"}) == []


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"schedule": "sppo"}, "parallel.schedule=sppo holds one stage on a rank; write auto or"),
        ({"pipeline_parallel_degree": 2}, "2 pipeline ranks need a layer each, and there are 2"),
    ],
)
def test_virtual_stages_that_contradict_the_rest(parallel, told):
    path, value, rule = only(parallel={"virtual_stages": 2, **parallel})
    assert (path, value) == ("parallel.virtual_stages", "2")
    assert told in rule


@pytest.mark.parametrize("policy", ["auto", *POLICIES, *OFFLOADING_POLICIES])
def test_every_policy_runs(policy):
    assert problems(activations={"policy": policy, "disk": "spill"}) == []


def test_every_tier_may_be_written():
    """What a run file alone cannot tell: a CPU has no host tier, which training refuses."""
    for tier in ("auto", "device", "host", "disk"):
        assert problems(activations={"tier": tier}) == []


def test_offloading():
    for ratio in (0, 0.5, 1):
        assert problems(activations={"offload_ratio": ratio}) == []
    assert problems(optimizer={"offload": True}) == []


def test_windows_start_at_a_layer_there_is():
    window = {"sliding_window": 16}
    assert problems(model={**window, "sliding_window_first_layer": 2}) == []
    path, value, rule = only(model={**window, "sliding_window_first_layer": 3})
    assert (path, value) == ("model.sliding_window_first_layer", "3")
    assert "2 layers" in rule


def test_learned_positions_reach_the_end():
    learned = {"position": "learned", "max_positions": 64}
    assert problems(model=learned) == []
    path, value, rule = only(model=learned, sequence={"length": 65})
    assert (path, value) == ("sequence.length", "65")
    assert "64 learned positions" in rule
    assert problems(model={"max_positions": 32}) == []  # rotary ones have no table


DOCUMENTS = {"samples": "documents"}


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"samples_per_step": 2}},
        {"train": {"samples_per_step": 1}, "sequence": {"longer": "drop"}},
        {"train": {"tokens_per_step": 64}, "sequence": {"longer": "refuse"}},
        {"train": {"tokens_per_step": "4Ki"}, "sequence": {"num_subsequences": 2}},
        {"train": {"tokens_per_step": 128}, "parallel": {"data_parallel_degree": 2}},
        {"train": {"samples_per_step": 2}, "parallel": {"data_parallel_degree": 2}},
        {"train": {"samples_per_step": 2}, "parallel": {"zero": 3}},
    ],
)
@pytest.mark.parametrize("isolate", [True, False])
def test_samples(sections, isolate):
    assert problems(data={**DOCUMENTS, "isolate_documents": isolate}, **sections) == []


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"train": {}},
            "train.samples_per_step (missing) data.samples=documents needs it or "
            "train.tokens_per_step; write one",
        ),
        (
            {"train": {"samples_per_step": 3, "tokens_per_step": 64}},
            "train.tokens_per_step 64 train.samples_per_step=3 says",
        ),
        (
            {"train": {"samples_per_step": 3, "sequences_per_step": 2}},
            "train.sequences_per_step 2 counts sequences of a stream",
        ),
        (
            {"train": {"samples_per_step": 3}, "sequence": {"boundaries": [0, 64]}},
            "sequence.boundaries [0, 64] data.samples=documents has samples of many lengths",
        ),
        (
            {"train": {"samples_per_step": 3}, "parallel": {"data_parallel_degree": 4}},
            "train.samples_per_step 3 fewer than the 4 replicas",
        ),
        (
            {
                "train": {"samples_per_step": 3},
                "parallel": {"data_parallel_degree": 2, "zero": 2},
            },
            "parallel.zero 2 shards gradients over 2 data-parallel replicas",
        ),
        (
            {"train": {"tokens_per_step": 63}},
            "train.tokens_per_step 63 must hold a sample of sequence.length = 64 tokens; raise it "
            "to at least 64",
        ),
        (
            {"train": {"tokens_per_step": 127}, "parallel": {"data_parallel_degree": 2}},
            "train.tokens_per_step 127 must hold a sample of sequence.length = 64 tokens for each "
            "of 2 replicas; raise it to at least 128",
        ),
    ],
)
def test_steps_that_do_not_suit_samples(sections, told):
    assert " ".join(only(data=DOCUMENTS, **sections)).startswith(told)


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"train": {"samples_per_step": 3}}, "train.samples_per_step"),
        ({"train": {"tokens_per_step": 640}}, "train.tokens_per_step"),
        ({"sequence": {"longer": "drop"}}, "sequence.longer"),
    ],
)
def test_a_stream_has_no_samples(sections, path):
    found, _, rule = only(**sections)
    assert found == path
    assert "write data.samples=documents, or" in rule


def test_broken_rules_of_several_sections_are_all_told():
    found = problems(
        sequence={"num_subsequences": 65},
        parallel={"schedule": "gpipe", "multiplexed": "on"},
        model={"sliding_window": 16, "sliding_window_first_layer": 3},
    )
    assert len(found) == 3
