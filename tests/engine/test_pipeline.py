"""Pipeline, sequence and data parallelism over gloo, in float64 against one process."""

import pytest
import torch

from sppo.engine.engine import Engine
from sppo.schedule.orders.names import WITH_VIRTUAL_STAGES
from tests.engine.models import assert_same_step, autograd_step, random_weights
from tests.engine.offloading import RatioRows
from tests.engine.pipelined import Case, answers_of
from tests.tiers import default_of, each_once, exhaustive

UNEVEN = ((0, 3, 4, 11, 17), (0, 6, 9), (0, 1, 5, 6, 9, 13, 16, 19))
SHAPES = [(1, 1, 4), (1, 2, 4), (2, 1, 4), (1, 1, 3), (2, 4, 1), (3, 1, 1)]
CUTS_FOR_TWO = ((0, 3, 5, 11, 17), (0, 6, 9))


def assembled(case, answers, step):
    """(loss, gradients) out of what every rank holds."""
    loss = sum(answer[step][0] for answer in answers) / answers[0][step][1]
    weights = random_weights(case.model())
    found = {name: torch.full_like(w, float("nan")) for name, w in weights.items()}
    for answer in answers:
        for name, (place, gradient) in answer[step][2].items():
            found[name][place] = gradient
    return torch.tensor(loss, dtype=torch.float64), found


def evaluated(case, step):
    """Sum of the losses of the step's first sequence, before the step."""
    model = case.model()
    engine = Engine(model, weights=random_weights(model), gradients=None)
    return float(engine.evaluate(case.sequences(step, 0)[0], case.cuts[0]).sum())


def check(ranks, case):
    """Compare a case with the plain model; what each rank answers, by step."""
    answers = answers_of(ranks, case)
    for step in range(case.steps):
        expected = autograd_step(
            case.model(), random_weights(case.model()), case.all_sequences(step)
        )
        assert_same_step(assembled(case, answers, step), expected, tolerance=1e-10)
        for answer in answers:
            assert answer[step][3] == answer[step][4]  # what was executed is the program
        assert sum(answer[step][7] for answer in answers) == pytest.approx(
            evaluated(case, step), rel=1e-11
        )
    return answers


UNCUT = ((0, 9), (0, 5), (0, 17))
SCHEDULES = {
    "sppo": UNEVEN,
    "seq1f1b": UNEVEN,
    "seq_zb_h1": UNEVEN,
    "interleaved_seq1f1b": UNEVEN,
    "looped_bfs": UNEVEN,
    "gpipe": UNEVEN,
    "1f1b": UNCUT,
    "interleaved_1f1b": UNCUT,
    "zb_h1": UNCUT,
}


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "sequences"), each_once(SCHEDULES, [2, 3, 4], [1, 3])
)
def test_gradients_of_a_pipeline(ranks, schedule, num_ranks, sequences):
    virtual = 2 if schedule in WITH_VIRTUAL_STAGES else 1
    layers = {"num_layers": num_ranks * virtual + 1}
    check(
        ranks,
        Case(
            shape=(1, num_ranks, 1),
            schedule=schedule,
            virtual=virtual,
            cuts=SCHEDULES[schedule][:sequences],
            sizes=layers,
        ),
    )


@pytest.mark.parametrize(
    ("variant", "policy"),
    each_once(
        ["gpt", "mixed: layernorm, rotary, q/k-norm, linear", "mha"],
        ["retain", "keep_attention", "recompute"],
    ),
)
def test_gradients_of_every_model_on_every_axis(ranks, variant, policy):
    check(ranks, Case(variant, shape=(2, 2, 2), policy=policy, cuts=CUTS_FOR_TWO))


def shared_heads(shapes):
    """Key/value heads and shapes of the mesh whose ranks can share them out."""
    return [
        (kv_heads, shape)
        for kv_heads in (1, 2, 4, 12)
        for shape in shapes
        if kv_heads % shape[2] == 0 or shape[2] % kv_heads == 0
    ]


@pytest.mark.parametrize(
    "heads_and_shape",
    default_of(
        shared_heads(SHAPES),
        *[(1, shape) for shape in [(1, 1, 4), (2, 4, 1), (3, 1, 1)]],
        *[(2, (1, 2, 4)), (4, (2, 1, 4)), (12, (1, 1, 3))],
    ),
    ids=str,
)
def test_gradients_with_shared_heads(ranks, heads_and_shape):
    """More ranks than key/value heads, as many, and fewer."""
    kv_heads, shape = heads_and_shape
    sizes = {"num_layers": 4, "num_heads": 12, "num_kv_heads": kv_heads, "head_size": 4}
    cuts = ((0, 5, 9, 23), (0, 4, 13))
    check(ranks, Case("mqa, window, biases", shape=shape, cuts=cuts, sizes=sizes))


@pytest.mark.parametrize("schedule", ["sppo", "seq_zb_h1"])
def test_sequences_of_one_length_use_the_same_memory_again(ranks, schedule):
    check(ranks, Case(shape=(1, 2, 1), schedule=schedule, cuts=((0, 3, 4, 11, 17),) * 4))


@pytest.mark.parametrize(
    ("schedule", "sequence_parallel", "shape"),
    [
        ("zb_h1", "ulysses", (1, 2, 1)),
        ("zb_h1", "megatron", (1, 2, 2)),
        ("seq_zb_h1", "megatron", (1, 2, 1)),
        ("seq_zb_h1", "ulysses", (1, 2, 2)),
    ],
)
def test_weight_gradients_outlive_the_sequence_they_belong_to(
    ranks, schedule, sequence_parallel, shape
):
    """One key/value head and one subsequence: its dV is all of the KV store's buffer."""
    check(
        ranks,
        Case(
            "mqa, window, biases",
            shape=shape,
            sequence_parallel=sequence_parallel,
            schedule=schedule,
            cuts=((0, 9),) * 4,
            sizes={"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 4},
            steps=2,
        ),
    )


@pytest.mark.parametrize("schedule", ["sppo", "seq_zb_h1"])
@pytest.mark.parametrize("shared", [True, *exhaustive(False)])
def test_steps_in_a_row(ranks, schedule, shared):
    case = Case(
        "tied, yarn, all biases",
        shape=(2, 2, 1),
        schedule=schedule,
        cuts=UNEVEN[:2],
        steps=3,
        shared=shared,
    )
    check(ranks, case)


@pytest.mark.parametrize("schedule", ["sppo", "seq1f1b", "seq_zb_h1"])
@pytest.mark.parametrize("shape", [(1, 2, 2), *exhaustive((1, 3, 1))])
def test_tensors_moved_to_a_disk_in_every_stage(ranks, tmp_path, schedule, shape):
    model = Case().model()
    case = Case(
        shape=shape,
        schedule=schedule,
        cuts=((0, 4, 9, 14, 19),) * 3,
        placement_of=RatioRows(model, 8, 0.7, alignment=1),
        directory=tmp_path,
        steps=2,
    )
    check(ranks, case)


LOOPED_CUTS = ((0, 6, 9, 13, 16, 19), (0, 4, 7, 9))
"""Five subsequences, then three of a shorter sequence: no multiple of two or of four ranks."""
LOOPED = {
    "one sequence": ((1, 2, 1), 3, {}),
    "three ranks": ((1, 3, 1), 2, {}),
    "four ranks": ((1, 4, 1), 2, {}),
    "shared tokens": ((1, 2, 2), 2, {}),
    "shared weights": ((1, 2, 2), 2, {"sequence_parallel": "megatron"}),
    "replicas": ((2, 2, 1), 2, {"zero": 3}),
}


@pytest.mark.parametrize(
    "name",
    default_of(LOOPED, "four ranks", "shared tokens", "shared weights", "replicas"),
)
def test_keys_of_a_looped_pipeline_leave_and_come_back(ranks, tmp_path, name):
    shape, virtual, how = LOOPED[name]
    sizes = {"num_layers": shape[1] * virtual + 1}
    model = Case(sizes=sizes).model()
    whole = "sequence_parallel" in how  # such ranks cut no class
    case = Case(
        shape=shape,
        schedule="looped_bfs",
        virtual=virtual,
        cuts=LOOPED_CUTS[:1] if name == "one sequence" else LOOPED_CUTS,
        placement_of=RatioRows(model, 8, 0.0 if whole else 0.5, alignment=1, last_too=True),
        directory=tmp_path,
        kv_offloaded=tuple(range(shape[1] * (virtual - 1))),
        sizes=sizes,
        steps=2,
        **how,
    )
    check(ranks, case)


@pytest.mark.parametrize("name", default_of(LOOPED, "four ranks", "shared tokens"))
def test_keys_of_a_looped_pipeline_are_recomputed(ranks, name):
    shape, virtual, how = LOOPED[name]
    case = Case(
        shape=shape,
        schedule="looped_bfs",
        virtual=virtual,
        cuts=LOOPED_CUTS[:1] if name == "one sequence" else LOOPED_CUTS,
        kv_recomputed=tuple(range(shape[1] * (virtual - 1))),
        sizes={"num_layers": shape[1] * virtual + 1},
        steps=2,
        **how,
    )
    check(ranks, case)
