"""ZeRO-2 and 3: when gradients are reduced, and how much of them and of weights is whole."""

from dataclasses import replace
from math import prod
from unittest import mock

import pytest
import torch.distributed as dist

from sppo.cost.parameters import layer_shapes, outer_shapes, parameter_shapes
from sppo.engine.providers.gradients import gradients_of
from sppo.engine.providers.part_rows import PartRows
from sppo.engine.providers.sharded_gradients import ShardedGradients
from sppo.model.gradients import zero_gradients
from sppo.parallel.row_messages import RowMessage
from tests.engine.models import random_weights, tiny_model
from tests.engine.providers.rows import layouts_of, rows_of
from tests.random_training.pinned_cases import GQA, TWO, case
from tests.random_training.training import results_of
from tests.tiers import exhaustive

ELEMENT = 8


def most_gathered_bytes(model, count):
    """Two layers, or the largest part outside of them, with every rank's interval made equal."""

    def padded(elements):
        return ELEMENT * count * -(-elements // count)

    def size(shapes):
        return sum(padded(prod(shape)) for shape in shapes.values())

    outer = outer_shapes(model)
    embedding = {n: s for n, s in outer.items() if n.split(".")[0] in ("embed", "positions")}
    behind = {n: s for n, s in outer.items() if n.split(".")[0] in ("final_norm", "head")}
    if model.tie_embeddings:
        behind["embed.weight"] = outer["embed.weight"]
    layer = sum(map(prod, layer_shapes(model, 0).values()))
    return 2 * padded(layer), max(size(embedding), size(behind))


@pytest.mark.parametrize(
    ("vocab_size", "which"), [(8, 0), (2000, 1)], ids=["two layers", "embedding"]
)
@pytest.mark.parametrize("zero", [3, *exhaustive(2)])
def test_no_more_than_two_layers_or_the_largest_outer_part(vocab_size, which, zero):
    one = case(replace(GQA, vocab_size=vocab_size), 4, dp=3, zero=zero, **TWO)
    most = most_gathered_bytes(one.model.config(), 3)  # weights are float64, too
    assert max(most) == most[which]
    for (result,) in results_of(one):
        assert result.peaks.whole_gradients_bytes == max(most)
        assert result.peaks.gathered_bytes == (max(most) if zero == 3 else 0)


def provider(model):
    layouts = layouts_of(parameter_shapes(model))
    shards = zero_gradients(rows_of(random_weights(model), layouts))
    groups = dict.fromkeys(layouts, dist.group.WORLD)
    return shards, ShardedGradients(PartRows(shards, layouts, groups))


def walked(_rank):
    """What is under way when, as a stage walks down; a group of one does."""
    model = tiny_model(num_layers=3, vocab_size=8)
    log = []

    def noted(name, original):
        def call(self):
            log.append((name, self.key))
            return original(self)

        return mock.patch.object(RowMessage, original.__name__, call)

    with noted("begun", RowMessage.reduce), noted("added", RowMessage.wait):
        shards, gradients = provider(model)
        for part in ("head", 2, 1, 0, "embedding"):
            with gradients_of(gradients, part) as totals:
                log.append(("formed", part))
                for total in totals.values():
                    total.add_(1.0)
        gradients.wait_reductions()
    return log, all(bool((shard == 1.0).all()) for shard in shards.values())


def test_a_part_is_on_its_way_while_the_next_is_formed(ranks):
    ((log, all_added),) = ranks.run(walked, ranks=1)
    assert all_added
    layer = "layers.{}".format
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


def test_parameters_of_rows_that_stay_are_viewed_once():
    model = tiny_model()
    layouts = layouts_of(parameter_shapes(model))
    parameters = PartRows(rows_of(random_weights(model), layouts), layouts, {})
    assert all(parameters[name] is view for name, view in parameters.items())
