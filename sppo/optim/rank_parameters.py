"""Parameters that one rank computes with, and the flat rows in which it holds them."""

from __future__ import annotations

from sppo.config.model import ModelConfig
from sppo.cost.trainable import Trainable
from sppo.engine.pipeline import Pipeline
from sppo.parallel.flat_row import FlatRow
from sppo.parallel.megatron import WeightSharding
from sppo.parallel.mesh import Mesh


class RankParameters:
    """Parameters of the stages of one rank, by global name, in rows, by key.

    A layer has a row for each kind of ranks that hold the same values; outside of the layers each
    parameter has a row. Parameters that train and frozen ones are in rows of their own.

    Args:
        model: Model configuration.
        mesh: Mesh of all ranks; its shape says whether sequence-parallel groups shard weights.
        pipeline: The stages of this rank.
        trainable: Factors of adapters, and which parameters train.
    """

    def __init__(
        self, model: ModelConfig, *, mesh: Mesh, pipeline: Pipeline, trainable: Trainable
    ) -> None:
        rank, degree = mesh.at.sequence, mesh.shape.sequence_parallel
        if mesh.shape.key_copies is None:
            rank, degree = 0, 1
        self.sharding = WeightSharding(model, rank, degree, trainable)
        by_stage = {
            stage: self.sharding.shapes(layers) for stage, layers in pipeline.layers(model).items()
        }
        self.shapes = {name: shape for own in by_stage.values() for name, shape in own.items()}
        """Shapes of the parameters (with Megatron, of shards), by global name."""
        self.keys = self._keys()
        """Keys of the rows of all parameters."""
        self.of_stages = {
            stage: [*dict.fromkeys(self.keys[name] for name in own)]
            for stage, own in by_stage.items()
        }
        """Keys of the rows of each stage."""
        self.kinds = {key: self.sharding.replica_group(name) for name, key in self.keys.items()}
        """Kind of the ranks that hold the same values as this rank, by key."""
        self.layouts = {key: self._layout(key, mesh) for key in self.kinds}
        self.trained = {
            key: self.layouts[key] for name, key in self.keys.items() if trainable.trains(name)
        }
        """Layouts of the rows of parameters that train."""

    def _keys(self) -> dict[str, str]:
        """Return the keys of all parameters' rows: the parameter itself, or its layer and ranks.

        Where a layer also has frozen parameters, those that train have another row.
        """
        trains, keys = self.sharding.trainable.trains, {}
        for name in self.shapes:
            owner, index, *_ = name.split(".")
            kind = self.sharding.replica_group(name)
            keys[name] = f"{owner}.{index} of {kind}" if owner == "layers" else name
        frozen = {key for name, key in keys.items() if not trains(name)}
        return {
            name: f"{key}, trained" if key in frozen and trains(name) else key
            for name, key in keys.items()
        }

    def _layout(self, key: str, mesh: Mesh) -> FlatRow:
        ranks = mesh.replica_ranks[self.kinds[key]]
        shapes = {name: shape for name, shape in self.shapes.items() if self.keys[name] == key}
        return FlatRow(shapes, ranks=len(ranks), rank=ranks.index(mesh.rank))
