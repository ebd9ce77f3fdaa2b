"""Baseline methods for long sequences: what each recomputes, shards, and keeps in host memory.

- one device: every device has whole sequences; states are sharded over all devices (ZeRO-3).
- megatron: tensor and sequence parallelism inside a node, with pipeline stages across nodes.
- ulysses: one group as large as heads and devices allow; states are sharded over all devices
  (ZeRO-3).
- alst: ulysses with layer inputs and the training state in host memory (ZeRO-3 offload), and the
  MLP in tiles whose number of tokens is the hidden size (Arctic Long Sequence Training,
  arXiv:2506.13996).
- fpdt: ulysses with layer inputs and the training state in host memory, and whole layers in chunks
  of 64Ki tokens. K and V of two chunks are on the device at once, the others in host memory (Fully
  Pipelined Distributed Transformer, arXiv:2408.16978; DeepSpeed's Ulysses-Offload).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sppo.config.model import ModelConfig
from sppo.cost.layer import Mechanism
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import Degrees, divisors
from sppo.units import KIB


@dataclass(frozen=True, slots=True)
class Method:
    """Baseline method that does not cut sequences into units of a pipeline.

    Attributes:
        name: Name in tables.
        policy: "retain" or "recompute".
        mechanism: Kind of sequence parallelism, "ulysses" or "megatron".
        zero: ZeRO level.
        degrees: Function that returns the degrees to try, given a model and a machine.
        uses_host: Whether layer inputs and the training state are in host memory.
        tiles_mlp: Whether the MLP runs in tiles whose number of tokens is the hidden size.
        chunk_tokens: Tokens of each chunk that passes a whole layer; None for whole sequences.
    """

    name: str
    policy: str
    mechanism: Mechanism
    zero: int
    degrees: Callable[[ModelConfig, HardwareSpec], Iterable[Degrees]]
    uses_host: bool = False
    tiles_mlp: bool = False
    chunk_tokens: int | None = None


def _whole_sequences(_model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    yield Degrees(hardware.num_devices, 1, 1)


def _inside_nodes(model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    """Yield degrees with groups inside a node and as many equal stages as the devices allow."""
    for group in divisors(hardware.node.num_devices):
        room = hardware.num_devices // group
        if model.num_heads % group == 0:
            stages = max(n for n in divisors(model.num_layers) if n <= room)
            yield Degrees(room // stages, stages, group)


def _across_heads(model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    group = max(n for n in divisors(model.num_heads) if n <= hardware.num_devices)
    yield Degrees(hardware.num_devices // group, 1, group)


KEEPS_EVERYTHING = "one device, no recompute"
RECOMPUTES = "one device, recompute"
MEGATRON_KEEPS = "Megatron SP, no recompute"
MEGATRON = "Megatron SP, recompute"
ULYSSES = "Ulysses, recompute"
ALST = "ALST"
FPDT = "FPDT"
METHODS = (
    Method(KEEPS_EVERYTHING, "retain", "ulysses", 3, _whole_sequences),
    Method(RECOMPUTES, "recompute", "ulysses", 3, _whole_sequences),
    Method(MEGATRON_KEEPS, "retain", "megatron", 1, _inside_nodes),
    Method(MEGATRON, "recompute", "megatron", 1, _inside_nodes),
    Method(ULYSSES, "recompute", "ulysses", 3, _across_heads),
    Method(ALST, "recompute", "ulysses", 3, _across_heads, uses_host=True, tiles_mlp=True),
    Method(FPDT, "recompute", "ulysses", 3, _across_heads, uses_host=True, chunk_tokens=64 * KIB),
)
