"""ZeRO-3: weights gathered before each use, in float64 against the model on one process."""

import pytest
import torch
import torch.distributed as dist

from sppo.cost.parameters import parameter_shapes
from sppo.engine.engine import Engine
from sppo.engine.providers.gathered_weights import GatheredWeights
from sppo.parallel.data_parallel import rows_of
from sppo.parallel.parameter_all_gather import ParameterAllGather
from tests.engine.models import random_sequence, random_weights, tiny_model

TIED = "tied, yarn, all biases"


def own_rows(weights, rank, count):
    return {
        name: w[rows_of(w.shape[0], index=rank, count=count)].clone() for name, w in weights.items()
    }


def provider(rank, model, weights):
    gather = ParameterAllGather(dist.group.WORLD, index=rank)
    shapes = parameter_shapes(model)
    return GatheredWeights(
        own_rows(weights, rank, gather.count), shapes=shapes, gathers=dict.fromkeys(shapes, gather)
    )


def evaluated(rank, cuts):
    model = tiny_model(TIED, num_layers=3)
    weights = random_weights(model)
    engine = Engine(model, weights=provider(rank, model, weights), gradients=None)
    data = random_sequence(model, cuts[-1])
    losses = [engine.evaluate(data, cuts) for _ in range(2)]
    return losses, engine.take_peaks().gathered_bytes


def test_evaluation_gathers_too(ranks):
    cuts = (0, 4, 9, 17)
    model = tiny_model(TIED, num_layers=3)
    whole = Engine(model, weights=random_weights(model), gradients=None)
    expected = whole.evaluate(random_sequence(model, 17), cuts)
    for losses, gathered_bytes in ranks.run(evaluated, cuts, ranks=2):
        assert gathered_bytes > 0
        for found in losses:
            assert torch.equal(found, expected)


class _Recorded(ParameterAllGather):
    """Gathers of a group of one, written down."""

    def __init__(self, group, log):
        super().__init__(group, index=0)
        self.log = log

    def begin(self, rows, shapes):
        self.log.append(next(iter(rows)))
        return super().begin(rows, shapes)


def walked(_rank):
    """What is gathered when, as a stage walks up and down; a group of one does."""
    model = tiny_model(num_layers=3, vocab_size=8)
    weights, log = random_weights(model), []
    gathers = dict.fromkeys(weights, _Recorded(dist.group.WORLD, log))
    provider = GatheredWeights(weights, shapes=parameter_shapes(model), gathers=gathers)
    visits = ["embedding", 0, 1, 2, 2, 1, 0]
    provider.begin(iter(visits))
    seen = []
    for part in visits:
        held = provider.take(part)
        seen.append((part, len(log)))
        provider.release(part)
        retained = bool(held)
        seen.append(retained)
    provider.begin(())
    return seen, log


def test_the_next_part_is_on_its_way_and_one_wanted_again_stays(ranks):
    ((seen, log),) = ranks.run(walked, ranks=1)
    layer = "layers.{}.attention_norm.weight".format
    assert log == ["embed.weight", *map(layer, (0, 1, 2, 1, 0))]
    assert seen[::2] == [("embedding", 2), (0, 3), (1, 4), (2, 4), (2, 5), (1, 6), (0, 6)]
    assert seen[1::2] == [False, False, False, True, False, False, False]


def test_weights_are_taken_as_announced(ranks):
    for problem in ranks.run(out_of_order, ranks=1):
        assert problem == "1 is taken where 0 was announced"


def out_of_order(_rank):
    model = tiny_model(num_layers=2)
    weights = random_weights(model)
    gathers = dict.fromkeys(weights, ParameterAllGather(dist.group.WORLD, index=0))
    provider = GatheredWeights(weights, shapes=parameter_shapes(model), gathers=gathers)
    provider.begin([0, 1])
    with pytest.raises(AssertionError) as caught:
        provider.take(1)
    return str(caught.value)
