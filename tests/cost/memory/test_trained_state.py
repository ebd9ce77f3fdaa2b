"""Planned bytes of weights, gradients and optimizer states beside the rows that ranks hold."""

from math import prod

import pytest
import torch

from sppo.cost.candidate import Candidate
from sppo.cost.memory.state_memory import checkpoint_bytes, state_memory
from sppo.cost.sharding.heads import tensor_shard
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import EVERYTHING, Adapter, Trainable
from sppo.cost.workload import Workload
from sppo.engine.pipeline import Pipeline
from sppo.hardware.presets import PRESETS
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.mesh import Groups, Mesh
from sppo.parallel.mesh_shape import MeshShape
from tests.engine.models import tiny_model

MODEL = {
    "vocab_size": 48, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "head_size": 12,
    "mlp_size": 48,
}  # fmt: skip
TRAINED = {
    "everything": EVERYTHING,
    "adapters": Trainable(Adapter(rank=24, scale=1.0), ()),
    "adapters of a layer, norms": Trainable(
        Adapter(rank=24, scale=1.0, targets=("k", "down"), layers=(2,)), ("*norm.*",)
    ),
    "the last layer": Trainable(only=("layers.3.*",)),
    "embedding": Trainable(only=("embed.*",)),
}
LAYOUTS = {
    # data, pipeline, virtual stages, sequence, Megatron
    "one rank": (1, 1, 1, 1, False),
    "one rank, two stages": (1, 1, 2, 1, False),
    "pipeline": (1, 2, 1, 1, False),
    "replicas, pipeline": (2, 2, 1, 1, False),
    "ulysses": (1, 2, 1, 2, False),
    "megatron": (2, 1, 1, 4, True),
}
TIERS = {
    "on the device": StateTiers(),
    "frozen on the host": StateTiers(weights="host"),
    "all on the host": StateTiers(weights="host", gradients="host", optimizer="host"),
}


class Group:
    """Communicator of some ranks, without processes."""

    def __init__(self, ranks, rank):
        self.size, self.rank = ranks.__len__, lambda: ranks.index(rank)


class Grid(Mesh):
    """One rank of a mesh without processes."""

    def __init__(self, shape, rank):
        self.shape, self.rank, self._device = shape, rank, None
        self.at = shape.coordinates(rank)
        self.groups = Groups(
            replicas={
                kind: Group(ranks, rank)
                for kind, ranks in self.replica_ranks.items()
                if len(ranks) > 1
            }
        )

    def gather_group(self, kind):
        return self.groups.replicas.get(kind)


def rows_of(shapes, *, dtype):
    return {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in shapes.items()}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("zero", "tied", "tiers"),
    [
        (0, False, "on the device"),
        (1, True, "on the device"),
        (2, False, "all on the host"),
        (3, False, "frozen on the host"),
    ],
)
def test_ranks_hold_the_state_that_is_planned(trained, layout, zero, tied, tiers):
    data, pipeline, virtual, sequence, is_megatron = LAYOUTS[layout]
    trainable, streams = TRAINED[trained], TIERS[tiers]
    if virtual == 1 or (trainable == EVERYTHING and not streams.offloads_optimizer):
        streams = StateTiers()
    model = tiny_model(tie_embeddings=tied, num_kv_heads=2, **MODEL)
    workload = Workload(
        model,
        PRESETS["a100-80g"],
        sequence_parallel_degree=sequence,
        sequence_parallel="megatron" if is_megatron else "ulysses",
        trainable=trainable,
    )
    candidate = Candidate(
        workload,
        (16, 16),
        pipeline_parallel_degree=pipeline,
        data_parallel_degree=data,
        virtual_stages=virtual,
        schedule="sppo" if virtual == 1 else "looped_bfs",
        zero=zero,
        state=streams,
    )
    copies = tensor_shard(model, degree=sequence).repeats if is_megatron else None
    shape = MeshShape(data, pipeline, sequence, copies)
    for rank, memory in enumerate(state_memory(candidate)):
        state = ShardedState(
            model,
            mesh=Grid(shape, rank * sequence),
            pipeline=Pipeline(num_ranks=pipeline, rank=rank, num_virtual=virtual),
            device=torch.device("cpu"),
            zero=zero,
            trainable=trainable,
        )
        updated = sum(map(prod, state.owned_shapes.values()))
        weights = rows_of(state.weight_shapes, dtype=torch.bfloat16)
        gradients = rows_of(state.gradient_shapes, dtype=torch.float32)
        gathered = state.provider(weights)._weights.room_bytes
        whole = state.gradient_provider(gradients)._sums.room_bytes
        of_weights, of_gradients = (
            sum(row.nbytes for row in rows.values()) for rows in (weights, gradients)
        )
        streamed = sum(weights[key].nbytes for key in state.streamed_keys(streams))
        assert memory.tier_weights_bytes == streamed
        # All stages of the rank, of which there are two, are on the device at once.
        assert memory.device.weights_bytes == of_weights + gathered
        assert memory.device.gradients_bytes == of_gradients + whole
        moments = memory.host_optimizer_bytes + memory.device.optimizer_bytes
        assert moments == 12 * updated
        tied_twice = tied and rank and trainable.trains("embed.weight")
        embedding = 48 * 48 // (data * sequence if zero else 1)
        assert checkpoint_bytes(candidate)[rank] == 12 * (updated - embedding * tied_twice)
