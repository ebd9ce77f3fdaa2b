"""Planners of torch.distributed.checkpoint that save blocks, and read others out of them.

DCP stores every block as a chunk with its offsets and reads, for each wanted block, the parts of
all chunks that overlap it; that is how a checkpoint changes its layout. It knows how to ask its own
distributed tensors where they lie. These planners answer for :class:`StateBlock`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sppo.checkpoint.state_block import StateBlock


class BlockSavePlanner(DefaultSavePlanner):
    """Lets one of the ranks that hold a block write it, evenly over the ranks.

    Raises (while saving):
        ValueError: the blocks of a name do not tile one tensor of one dtype.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Plan to write this rank's blocks, without vacant ones, which would pass for others."""
        blocks: Mapping[str, StateBlock] = self.state_dict
        self.plan = SavePlan(
            [_write_item(name, block) for name, block in blocks.items() if not block.is_vacant]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan to write every block once. DCP finds overlaps; gaps are found here."""
        _check_tiles(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The data of one planned write."""
        return _tensor_of(self.state_dict, index)


class BlockLoadPlanner(DefaultLoadPlanner):
    """Fills blocks from whatever blocks were saved; their global shapes are known to fit."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take ``state_dict``, blocks by name, as it is."""
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan to read what overlaps each block that holds anything."""
        assert self.metadata is not None, "set up before planning"
        saved = self.metadata.state_dict_metadata
        blocks: Mapping[str, StateBlock] = self.state_dict
        return LoadPlan(
            [
                item
                for name, block in blocks.items()
                if block.tensor.numel() > 0
                for item in create_read_items_for_chunk_list(
                    name, _tensor_entry(saved[name]), [_chunk(block)]
                )
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that one planned read writes into."""
        return _tensor_of(self.state_dict, index)


def _write_item(name: str, block: StateBlock) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, block.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(block),
            properties=TensorProperties.create_from_tensor(block.tensor),
            size=torch.Size(block.global_shape),
        ),
    )


def _chunk(block: StateBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=block.tensor.shape)


def _tensor_of(state: Mapping[str, StateBlock], index: MetadataIndex) -> Tensor:
    block = state[index.fqn]
    assert index.offset == block.offsets, f"{index} is not what this rank holds: {block.offsets}"
    return block.tensor


def _tensor_entry(entry: object) -> TensorStorageMetadata:
    assert isinstance(entry, TensorStorageMetadata), "the shapes of tensors were compared before"
    return entry


def _check_tiles(plans: Sequence[SavePlan]) -> None:
    """Ranks must mean the same tensor by a name, the same block by its offsets, and lack none."""
    tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
    blocks: dict[MetadataIndex, torch.Size] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            assert data is not None, f"{name} is no tensor"
            assert data.chunk is not None, f"{name} is no block"
            this = (data.size, data.properties.dtype)
            known = tensors.setdefault(name, this)
            if known != this:
                raise ValueError(f"{name} is {this} on rank {rank}, {known} on one before")
            sizes = blocks.setdefault(item.index, data.chunk.sizes)
            if sizes != data.chunk.sizes:
                raise ValueError(
                    f"{name}: the block at {list(data.chunk.offsets)} is "
                    f"{list(data.chunk.sizes)} on rank {rank}, {list(sizes)} on one before"
                )
    held = dict.fromkeys(tensors, 0)
    for index, sizes in blocks.items():
        held[index.fqn] += math.prod(sizes)
    for name, (size, _) in tensors.items():
        if held[name] != math.prod(size):
            raise ValueError(f"{name} {list(size)}: all ranks together hold {held[name]} elements")
