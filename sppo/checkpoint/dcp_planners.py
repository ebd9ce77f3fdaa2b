"""Planners of torch.distributed.checkpoint (DCP) that save and load :class:`StateBlock`.

DCP stores every block as a chunk with its offsets. To load a block, DCP reads the parts of all
chunks that overlap the block, so a checkpoint can be loaded in another layout. DCP's own planners
know the offsets of its distributed tensors only; these planners know the offsets of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

from sppo.checkpoint.state_block import Blocks, StateBlock


class BlockSavePlanner(DefaultSavePlanner):
    """Save planner that has each block written by one of the ranks that hold it, evenly.

    Raises (while saving):
        ValueError: The blocks of a name do not tile one tensor of one dtype.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copy: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """Plan to write this rank's blocks.

        Vacant blocks are left out, because they may have the offsets of another block.
        """
        state: Blocks = self.state_dict
        self.plan = SavePlan(
            [
                _write_item(name, block)
                for name, blocks in state.items()
                for block in blocks
                if not block.is_vacant
            ]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan to write every block once. DCP detects overlaps; this method detects gaps."""
        _check_tiles(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of one planned write, on the CPU, in a storage of exactly its bytes.

        DCP copies tensors that are on a GPU or are views of a larger storage, and keeps every copy
        until the file is complete. Here a contiguous view is not copied, and a copy is freed when
        the next tensor is asked for: DCP's serial loader has written the copy by then.
        """
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)
            self._copy = None
        tensor = _tensor_of(self.state_dict, index).detach()
        if tensor.is_cpu and tensor.is_contiguous() and tensor.numel():
            return _with_own_storage(tensor)
        self._copy = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return self._copy


class BlockLoadPlanner(DefaultLoadPlanner):
    """Load planner that fills blocks from saved blocks of any layout.

    The caller has checked that the global shapes are equal (:func:`.tensors.check_fits`).
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the blocks to fill, by name, without the flattening of the base class."""
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan to read the saved chunks that overlap each block with elements."""
        assert self.metadata is not None, "set up before planning"
        saved = self.metadata.state_dict_metadata
        state: Blocks = self.state_dict
        return LoadPlan(
            [
                item
                for name, blocks in state.items()
                for block in blocks
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


def _tensor_of(state: Blocks, index: MetadataIndex) -> Tensor:
    (found,) = (b.tensor for b in state[index.fqn] if b.offsets == index.offset)
    return found


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return an alias of a contiguous CPU tensor whose storage ends where the tensor ends."""
    bytes_ = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(bytes_).view(tensor.dtype).view(tensor.shape)


def _tensor_entry(entry: object) -> TensorStorageMetadata:
    assert isinstance(entry, TensorStorageMetadata), "the shapes of tensors were compared before"
    return entry


def _check_tiles(plans: Sequence[SavePlan]) -> None:
    """Raise ValueError unless the blocks of all ranks tile each tensor, with equal dtypes."""
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
