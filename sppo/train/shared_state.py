"""Which part of a run's weights, gradients and optimizer state is this rank's, and how parts meet.

A rank computes with the whole parameters of its stages. Of each it updates the rows that
:class:`sppo.parallel.data_parallel.StageGroup` gives it, so masters and moments exist once among
the ranks of a stage. Where the vocabulary projection is the embedding, the first and the last
stage both hold it: their gradients are added up, both update it, and the first speaks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.engine.pipeline import Pipeline
from sppo.parallel.data_parallel import StageGroup, add_up
from sppo.parallel.mesh import Mesh
from sppo.planning.parameters import Shape, stage_shapes
from sppo.train.checkpoint import MODEL_PREFIX
from sppo.train.optimizer import MOMENTS, STEP_KEY, global_norm
from sppo.train.peers import Peers
from sppo.train.state_block import StateBlock

_TIED = "embed.weight"


class SharedState:
    """The shares of one rank.

    Args:
        model: the shape.
        mesh: of all ranks.
        pipeline: this rank's place in it.
        zero: 1 shares the optimizer's state among the ranks of a stage, 0 does not.
    """

    def __init__(self, model: ModelConfig, *, mesh: Mesh, pipeline: Pipeline, zero: int) -> None:
        self._by_stage = {
            stage: stage_shapes(model, layers)
            for stage, layers in pipeline.layers(model.num_layers).items()
        }
        self.shapes: dict[str, Shape] = {
            name: shape for shapes in self._by_stage.values() for name, shape in shapes.items()
        }
        self._mesh = mesh
        self._group = StageGroup(
            mesh.groups.stage,
            index=mesh.stage_ranks.index(mesh.rank),
            shapes=self.shapes,
            shared=zero > 0,
        )
        ends = mesh.shape.pipeline_parallel > 1 and model.tie_embeddings
        self._is_tied = ends and _TIED in self.shapes
        self._speaks_for_tied = not self._is_tied or mesh.at.pipeline == 0

    def own(self, tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
        """The rows that this rank updates. Parameters of which it has none are left out.

        Args:
            tensors: whole parameters, or their gradients, by global name.
            copy: where the rows are not all, copy them, so that the others can be forgotten.
        """
        found = {}
        for name, tensor in tensors.items():
            rows = tensor[self._group.own_rows(name)]
            if rows.shape[0] == tensor.shape[0]:
                found[name] = tensor
            elif rows.shape[0]:
                found[name] = rows.clone() if copy else rows
        return found

    def reduce(self, stage: int, gradients: Mapping[str, Tensor]) -> None:
        """Begin to add up the gradients of a stage, complete on this rank."""
        self._group.reduce(gradients, self._by_stage[stage])

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """Return when gradients are those of all ranks, in the rows that this rank updates."""
        self._group.wait()
        if self._is_tied:
            rows = self._group.own_rows(_TIED)
            ends = self._mesh.groups.ends
            add_up([gradients[_TIED][rows]], ends, what="adding up the embedding's gradients")

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Fetch what other ranks have updated."""
        self._group.gather(weights)

    def norm(self, gradients: Mapping[str, Tensor], peers: Peers) -> Tensor:
        """Euclidean norm of the gradients of all parameters of all ranks."""
        if not self._mesh.is_distributed:
            return global_norm(gradients)
        counted = [
            gradient[self._group.counted_rows(name)]
            for name, gradient in gradients.items()
            if name != _TIED or self._speaks_for_tied
        ]
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in counted]
        (total,) = peers.total([float(torch.stack(squares).sum())])
        return torch.tensor(total**0.5, dtype=next(iter(gradients.values())).dtype)

    def blocks(self, state: Mapping[str, Tensor]) -> dict[str, StateBlock]:
        """An optimizer's state over :meth:`own` tensors as parts of the whole model's."""
        return {key: self._block(key, tensor) for key, tensor in state.items()}

    def saved(self, state: Mapping[str, Tensor]) -> dict[str, StateBlock]:
        """As :meth:`blocks`, without what another rank saves."""
        blocks = self.blocks(state)
        if self._speaks_for_tied:
            return blocks
        return {key: block for key, block in blocks.items() if _parameter(key) != _TIED}

    def _block(self, key: str, tensor: Tensor) -> StateBlock:
        name = _parameter(key)
        if name is None:
            return StateBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        shape = self.shapes[name]
        offsets = (self._group.own_rows(name).start, *(0 for _ in shape[1:]))
        assert prod(tensor.shape[1:]) == prod(shape[1:]), f"{key}: {tensor.shape} of {shape}"
        return StateBlock(tensor, offsets, shape)


def _parameter(key: str) -> str | None:
    """The parameter that an entry of an optimizer's state belongs to; None for the step."""
    if key == STEP_KEY:
        return None
    for prefix in (MODEL_PREFIX, *(f"optimizer.{moment}." for moment in MOMENTS)):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    raise AssertionError(f"{key} is no part of an optimizer's state")
