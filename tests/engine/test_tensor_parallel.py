"""Megatron's sequence parallelism over gloo: the model of one process, in float64."""

import pytest

from tests.engine.models import VARIANTS
from tests.engine.pipelined import Case
from tests.engine.test_pipeline import CUTS_FOR_TWO, check


@pytest.mark.parametrize("policy", ["retain", "keep_attention", "recompute"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)])
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


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 2, 4), (2, 1, 4), (1, 1, 3)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 12])
def test_gradients_with_shared_heads(ranks, shape, kv_heads):
    """More ranks than key/value heads, as many, and fewer."""
    if kv_heads % shape[2] and shape[2] % kv_heads:
        pytest.skip("refused: heads cannot be shared out")
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


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("schedule", ["sppo", "seq_zb_h1", "interleaved_seq1f1b"])
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
