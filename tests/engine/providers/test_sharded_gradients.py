"""ZeRO-2 and 3: gradients reduced after each use, weights gathered before, against one process."""

from math import prod

import pytest
import torch
import torch.distributed as dist

from sppo.cost.parameters import layer_shapes, outer_shapes, parameter_shapes
from sppo.engine.providers.gradients import gradients_of
from sppo.engine.providers.sharded_gradients import ShardedGradients
from sppo.model.gradients import zero_gradients
from sppo.parallel.gradient_reduce_scatter import GradientMessage, GradientReduceScatter
from tests.engine.models import random_weights, tiny_model
from tests.engine.offloading import RatioRows
from tests.engine.pipelined import Case, run_case
from tests.engine.test_pipeline import CUTS_FOR_TWO, UNEVEN, check
from tests.tiers import each_once, exhaustive

ELEMENT = 8
SHAPES = [(2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
UNTIED, TIED = "mqa, window, biases", "tied, yarn, all biases"


def most_gathered_bytes(case, count):
    """Two layers, or the largest part outside of them, with every rank's rows made equal."""
    model = case.model()

    def size(shapes):
        return ELEMENT * sum(
            count * -(-shape[0] // count) * prod(shape[1:]) for shape in shapes.values()
        )

    outer = outer_shapes(model)
    embedding = {n: s for n, s in outer.items() if n.split(".")[0] in ("embed", "positions")}
    behind = {n: s for n, s in outer.items() if n.split(".")[0] in ("final_norm", "head")}
    if model.tie_embeddings:
        behind["embed.weight"] = outer["embed.weight"]
    return 2 * size(layer_shapes(model)), max(size(embedding), size(behind))


@pytest.mark.parametrize(
    ("shape", "variant", "schedule", "zero"),
    each_once(SHAPES, [UNTIED, TIED], ["sppo", "seq_zb_h1"], [2, 3]),
    ids=str,
)
def test_gradients_of_steps_in_a_row(ranks, shape, variant, schedule, zero):
    sequences = 1 if schedule == "seq_zb_h1" and shape[1] == 1 else 2
    cuts = CUTS_FOR_TWO[:sequences]
    check(ranks, Case(variant, shape=shape, schedule=schedule, cuts=cuts, steps=2, zero=zero))


@pytest.mark.parametrize(
    ("variant", "policy", "zero"),
    each_once(
        ["gpt", "mixed: layernorm, rotary, q/k-norm, linear"], ["retain", "recompute"], [2, 3]
    ),
)
def test_gradients_of_other_models(ranks, variant, policy, zero):
    check(ranks, Case(variant, shape=(2, 2, 2), policy=policy, cuts=CUTS_FOR_TWO, zero=zero))


@pytest.mark.parametrize("zero", [3, *exhaustive(2)])
@pytest.mark.parametrize("schedule", ["interleaved_seq1f1b", *exhaustive("interleaved_1f1b")])
def test_gradients_of_stages_taking_turns(ranks, schedule, zero):
    cuts = UNEVEN if schedule == "interleaved_seq1f1b" else ((0, 9), (0, 5), (0, 17))
    case = Case(shape=(2, 2, 1), schedule=schedule, virtual=2, cuts=cuts, zero=zero)
    check(ranks, case)


@pytest.mark.parametrize("variant", [TIED, *exhaustive(UNTIED)])
@pytest.mark.parametrize("shape", [(2, 2, 1), *exhaustive((1, 2, 2), (2, 3, 1))], ids=str)
def test_gradients_of_shards_that_others_run(ranks, shape, variant):
    """MSP: what borrowers send home is added before the owners reduce it."""
    cuts = ((0, 12, 25, 41), (0, 12, 25, 41))
    sizes = {"num_layers": 4}
    case = Case(variant, shape=shape, schedule="sppo_msp", cuts=cuts, sizes=sizes, steps=2, zero=2)
    check(ranks, case)


@pytest.mark.parametrize("zero", [3, *exhaustive(2)])
def test_offloading_changes_no_bit(ranks, tmp_path, zero):
    model = tiny_model(UNTIED, num_layers=4)
    found = []
    for ratio in (None, 0.5):
        rows = ratio and RatioRows(model, 8, ratio, alignment=1)
        case = Case(
            UNTIED,
            shape=(2, 2, 1),
            cuts=CUTS_FOR_TWO,
            policy="retain",
            placement_of=rows,
            directory=ratio and str(tmp_path),
            zero=zero,
        )
        found.append(ranks.run(run_case, case, ranks=4))
    for retained, offloaded in zip(*found, strict=True):
        assert offloaded[0][8].total_out_bytes > 0
        assert retained[0][0] == offloaded[0][0]
        for name, (place, gradient) in retained[0][2].items():
            assert offloaded[0][2][name][0] == place
            assert torch.equal(offloaded[0][2][name][1], gradient)


@pytest.mark.parametrize(
    ("vocab_size", "which"), [(8, 0), (2000, 1)], ids=["two layers", "embedding"]
)
@pytest.mark.parametrize("zero", [3, *exhaustive(2)])
def test_no_more_than_two_layers_or_the_largest_outer_part(ranks, vocab_size, which, zero):
    sizes = {"num_layers": 4, "vocab_size": vocab_size}
    case = Case(shape=(3, 1, 1), cuts=UNEVEN[:2], zero=zero, sizes=sizes)
    most = most_gathered_bytes(case, 3)  # weights are float64, too
    assert max(most) == most[which]
    for answer in ranks.run(run_case, case, ranks=3):
        assert answer[0][5].whole_gradients_bytes == max(most)
        assert answer[0][5].gathered_bytes == (max(most) if zero == 3 else 0)


def provider(rank, model, **options):
    scatter = GradientReduceScatter(dist.group.WORLD, index=rank)
    shapes = parameter_shapes(model)
    shards = zero_gradients(random_weights(model))
    scatters = dict.fromkeys(shapes, scatter)
    return shards, ShardedGradients(shards, shapes=shapes, scatters=scatters, **options)


def walked(rank):
    """What is under way when, as a stage walks down; a group of one does."""
    model = tiny_model(num_layers=3, vocab_size=8)
    log = []

    def noted(name, original):
        def call(self, *arguments):
            log.append((name, self._parts[0].name))
            return original(self, *arguments)

        return call

    originals = GradientMessage.reduce, GradientMessage.add_to
    GradientMessage.reduce = noted("begun", originals[0])
    GradientMessage.add_to = noted("added", originals[1])
    try:
        shards, gradients = provider(rank, model)
        for part in ("head", 2, 1, 0, "embedding"):
            with gradients_of(gradients, part) as totals:
                log.append(("formed", part))
                for total in totals.values():
                    total.add_(1.0)
        gradients.wait_reductions()
        gradients.assert_idle()
    finally:
        GradientMessage.reduce, GradientMessage.add_to = originals
    return log, all(bool((shard == 1.0).all()) for shard in shards.values())


def test_a_part_is_on_its_way_while_the_next_is_formed(ranks):
    ((log, all_added),) = ranks.run(walked, ranks=1)
    assert all_added
    layer = "layers.{}.attention_norm.weight".format
    assert log == [
        ("formed", "head"),
        ("begun", "final_norm.weight"),
        ("begun", "head.weight"),
        ("formed", 2),
        ("added", "final_norm.weight"),
        ("added", "head.weight"),
        ("begun", layer(2)),
        ("formed", 1),
        ("added", layer(2)),
        ("begun", layer(1)),
        ("formed", 0),
        ("added", layer(1)),
        ("begun", layer(0)),
        ("formed", "embedding"),
        ("added", layer(0)),
        ("begun", "embed.weight"),
        ("added", "embed.weight"),
    ]


def failing(rank):
    """A use that ends with an error begins no reduction, and nothing of the step is left."""
    _, gradients = provider(rank, tiny_model(num_layers=3))
    with gradients_of(gradients, 2):
        pass
    with pytest.raises(RuntimeError, match="stop"), gradients_of(gradients, 1):
        raise RuntimeError("stop")
    with pytest.raises(AssertionError, match="gradients left over: {'taken': 1, 'under way': 1}"):
        gradients.assert_idle()
    with pytest.raises(AssertionError, match="0 is taken before 1 is released"):
        gradients.take(0)
    gradients.abort()
    gradients.assert_idle()
    return gradients.take_peak_bytes()


def test_a_failed_step_leaves_nothing(ranks):
    layer = sum(map(prod, layer_shapes(tiny_model(num_layers=3)).values()))
    assert ranks.run(failing, ranks=1) == [2 * layer * 8]
