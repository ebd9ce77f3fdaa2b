"""Megatron's sequence parallelism over gloo, in float64 against the model on one process."""

import pytest

from sppo.activations.policy import classes_retained
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import Workload
from sppo.cost.stage_cost import row_bytes_of
from sppo.hardware.presets import PRESETS
from tests.engine.models import VARIANTS, tiny_model
from tests.engine.offloading import FixedRows, RatioRows
from tests.engine.pipelined import Case, answers_of
from tests.engine.test_pipeline import CUTS_FOR_TWO, check, shared_heads
from tests.tiers import default_of, each_once, exhaustive


@pytest.mark.parametrize(
    ("variant", "shape", "policy"),
    each_once(VARIANTS, [(1, 2, 2), (2, 1, 2)], ["retain", "keep_attention", "recompute"]),
)
def test_gradients_of_every_model(ranks, variant, shape, policy):
    check(
        ranks,
        Case(
            variant,
            shape=shape,
            sequence_parallel="megatron",
            policy=policy,
            cuts=CUTS_FOR_TWO,
            sizes={"num_layers": 2},
        ),
    )


@pytest.mark.parametrize(
    "heads_and_shape",
    default_of(
        shared_heads([(1, 1, 4), (1, 2, 4), (2, 1, 4), (1, 1, 3)]),
        *[(1, (1, 1, 4)), (2, (1, 2, 4)), (4, (2, 1, 4)), (12, (1, 1, 3))],
    ),
    ids=str,
)
def test_gradients_with_shared_heads(ranks, heads_and_shape):
    """More ranks than key/value heads, as many, and fewer."""
    kv_heads, shape = heads_and_shape
    check(
        ranks,
        Case(
            "mqa, window, biases",
            shape=shape,
            sequence_parallel="megatron",
            cuts=((0, 5, 9, 23), (0, 4, 13)),
            sizes={
                "num_layers": 2,
                "num_heads": 12,
                "num_kv_heads": kv_heads,
                "head_size": 4,
                "mlp_size": 24,
            },
        ),
    )


@pytest.mark.parametrize(("shared", "kv_heads"), each_once([True, False], [4, 1]))
@pytest.mark.parametrize("schedule", ["interleaved_seq1f1b", *exhaustive("sppo", "seq_zb_h1")])
def test_steps_in_a_row(ranks, schedule, shared, kv_heads):
    check(
        ranks,
        Case(
            "tied, yarn, all biases",
            shape=(2, 2, 2),
            sequence_parallel="megatron",
            schedule=schedule,
            virtual=2 if schedule.startswith("interleaved") else 1,
            cuts=CUTS_FOR_TWO if schedule == "sppo" else ((0, 3, 7, 11), (0, 6, 9)),
            steps=3,
            shared=shared,
            sizes={"num_layers": 4, "num_kv_heads": kv_heads},
        ),
    )


@pytest.mark.parametrize("kv_heads", [4, *exhaustive(1)])
@pytest.mark.parametrize("shape", [(3, 1, 2), *exhaustive((2, 2, 2))])
def test_blocks_of_which_replicas_keep_rows(ranks, shape, kv_heads):
    """ZeRO-3: of its part of the weights a rank keeps the rows that it updates."""
    check(
        ranks,
        Case(
            "tied, yarn, all biases",
            shape=shape,
            sequence_parallel="megatron",
            zero=3,
            cuts=CUTS_FOR_TWO,
            steps=2,
            sizes={"num_layers": 3, "num_kv_heads": kv_heads},
        ),
    )


ALIGNED = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "head_size": 8,
    "num_kv_heads": 2,
    "mlp_size": 32,
}
"""Every saved tensor of 8 tokens is a multiple of the 64 bytes that slots are made of."""


@pytest.mark.parametrize("ratio", [0.7, *exhaustive(0.3, 1.0)])
@pytest.mark.parametrize("shape", [(1, 2, 4), *exhaustive((1, 1, 2))])
def test_tensors_that_move(ranks, shape, ratio, tmp_path):
    """Of the residual stream own tokens go to the disk, of heads and MLP those of all."""
    sizes = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "mlp_size": 24}
    model = tiny_model("gqa, q/k-norm", **sizes)
    rows = RatioRows(model, 8, ratio, alignment=1)
    plans = rows((5, 6, 9))
    assert any(0 < offloaded < 5 for offloaded in plans[0].offloaded) or ratio == 1.0
    case = Case(
        shape=shape,
        sequence_parallel="megatron",
        placement_of=rows,
        directory=str(tmp_path),
        cuts=((0, 5, 11, 20), (0, 4, 13)),
        steps=2,
        sizes=sizes,
    )
    check(ranks, case)


@pytest.mark.parametrize("policy", ["retain", "keep_attention", "recompute"])
def test_layers_that_share_an_input(ranks, policy):
    sizes = {"num_layers": 5}
    case = Case(
        shape=(1, 1, 2),
        sequence_parallel="megatron",
        policy=policy,
        input_every=3,
        cuts=CUTS_FOR_TWO,
        sizes=sizes,
    )
    check(ranks, case)


def test_recomputing_part_of_a_class_is_refused(ranks):
    model = tiny_model("gqa, q/k-norm", num_layers=2)
    rows = FixedRows(model, 8, (((9, 9, 4), (0, 0, 0), (0, 0, 5)),))
    case = Case(
        shape=(1, 1, 2),
        sequence_parallel="megatron",
        placement_of=rows,
        cuts=((0, 9),),
        sizes={"num_layers": 2},
    )
    with pytest.raises(Exception, match="recomputes 5 of 9 rows of linear of subsequence 0"):
        answers_of(ranks, case)


@pytest.mark.parametrize("policy", ["retain", "keep_attention", "recompute"])
@pytest.mark.parametrize("variant", ["mha", "gqa, q/k-norm"])
def test_bytes_held_are_those_predicted(ranks, variant, policy):
    """Saved tensors, K, V and their gradients: a rank holds exactly its share, no more."""
    sizes = {**ALIGNED, "num_kv_heads": 4} if variant == "mha" else ALIGNED
    case = Case(
        variant,
        shape=(1, 1, 2),
        sequence_parallel="megatron",
        policy=policy,
        cuts=((0, 16, 32),),
        sizes=sizes,
    )
    model = case.model()
    workload = Workload(
        model,
        PRESETS["a100-80g"],
        dtype="fp32",
        sequence_parallel_degree=2,
        sequence_parallel="megatron",
    )
    candidate = Candidate(workload, lengths=(16, 16))
    tokens, wider = 32, 2  # float64 where fp32 is predicted
    per_token = row_bytes_of(candidate)[0] * wider
    retained = (
        sum(per_token[index] for index in classes_retained(policy)) + model.hidden_size * 8 / 2
    )
    kv = sum(kv_bytes_per_token(workload)) * model.num_layers * wider
    for answer in answers_of(ranks, case):
        peaks = answer[0][5]
        assert peaks.activations_bytes == tokens * retained
        assert peaks.kv_bytes == tokens * kv
