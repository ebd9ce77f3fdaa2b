"""ZeRO-3: weights gathered before each use, in float64 against the model on one process."""

from unittest import mock

import torch.distributed as dist

from sppo.cost.parameters import parameter_shapes
from sppo.engine.engine import Engine
from sppo.engine.providers.gathered_weights import GatheredWeights
from sppo.engine.providers.part_rows import PartRows
from sppo.parallel import row_messages
from sppo.parallel.job.peer_errors import PeerLostError
from sppo.parallel.row_messages import RowMessage
from tests.engine.models import random_sequence, random_weights, tiny_model
from tests.engine.providers.rows import layouts_of, rows_of

TIED = "tied, yarn, all biases"


def provider(rank, model, weights):
    group = dist.group.WORLD
    layouts = layouts_of(parameter_shapes(model), ranks=group.size(), rank=rank)
    rows = rows_of(weights, layouts)
    shards = {key: row[layouts[key].own].clone() for key, row in rows.items()}
    return GatheredWeights(PartRows(shards, layouts, dict.fromkeys(layouts, group)))


def walked(rank):
    """What is gathered when, as a stage walks up and down; a group of one does."""
    model = tiny_model(num_layers=3, vocab_size=8)
    log, gather = [], RowMessage.gather

    def recorded(self, shard):
        log.append(self.key)
        return gather(self, shard)

    visits = ["embedding", 0, 1, 2, 2, 1, 0]
    seen = []
    with mock.patch.object(RowMessage, "gather", recorded):
        gathered = provider(rank, model, random_weights(model))
        gathered.begin(iter(visits))
        for part in visits:
            held = gathered.take(part)
            seen.append((part, len(log)))
            gathered.release(part)
            retained = bool(held)
            seen.append(retained)
        gathered.begin(())
    return seen, log


def test_the_next_part_is_on_its_way_and_one_wanted_again_stays(ranks):
    ((seen, log),) = ranks.run(walked, ranks=1)
    layer = "layers.{}".format
    assert log == ["embed.weight", *map(layer, (0, 1, 2, 1, 0))]
    assert seen[::2] == [("embedding", 2), (0, 3), (1, 4), (2, 4), (2, 5), (1, 6), (0, 6)]
    assert seen[1::2] == [False, False, False, True, False, False, False]


def without_peers(rank):
    gone = RuntimeError("NCCL communicator was aborted on rank 0.")
    model = tiny_model(num_layers=1)
    engine = Engine(model, weights=provider(rank, model, random_weights(model)), gradients=None)
    with mock.patch.object(row_messages, "all_gather", side_effect=gone):
        try:
            engine.evaluate(random_sequence(model, 3), (0, 3))
        except PeerLostError as error:
            return str(error)


def test_a_peer_that_is_lost_between_steps(ranks):
    (said,) = ranks.run(without_peers, ranks=1)
    assert said.startswith("beginning a step: ")
