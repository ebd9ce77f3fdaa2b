"""Hardware description: rates, memory and links of the machine that a plan is made for.

Presets are *analytic*: vendors' figures, times the fraction that good kernels reach on long
sequences. `sppo bench` writes a file with rates measured on a machine; plans prefer these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from sppo.config.base import MOST_RANKS
from sppo.hardware.rates import (
    GRIDS,
    PUBLISHED_BLOCKS,
    AttentionPoint,
    BytesPerS,
    ElementwisePoint,
    Floats,
    FlopsPerS,
    GemmPoint,
    Grid,
    Product,
    PublishedAttention,
    attention_blocks,
    attention_rates,
    gemm_blocks,
    published_rates,
    rate_grids,
    wave_fill,
)
from sppo.quoting import quoted

DeviceKind = Literal["cuda", "cpu"]
Provenance = Literal["measured", "calibrated", "analytic"]
ATTENTION_BACKENDS = (
    "cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_flash", "torch_blocks"
)  # fmt: skip
"""Attention back ends of a GPU, as in :mod:`sppo.kernels.attention.choice`."""

_PRESET = re.compile(r" \((preset|unknown, nearest by memory:) [^()]*\)$")
"""End of the name of a detected machine: the preset nearest to it, whose rates it has at first."""
_Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
_Seconds = Annotated[float, Field(ge=0, le=3600)]
_SecondsPerByte = Annotated[float, Field(ge=0, le=1)]
_Efficiency = Annotated[float, Field(ge=1e-6, le=1)]
_Count = Annotated[int, Field(ge=1, le=1 << 30)]
_OptionalRate = Annotated[float, Field(ge=0, le=1e15)]
"""Bytes or FLOPs per second; 0 where nothing is copied, or no bound or rate is known."""
_LEAST_RATE = 1e-3
_MOST_POINTS = Field(max_length=4096)


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, or the CPU of one machine.

    Attributes:
        kind: "cuda" or "cpu"; on a CPU, device memory is the machine's memory.
        memory_bytes: Total memory of the device, in bytes.
        reserved_bytes: Part of `memory_bytes` that no plan may use: context, libraries,
            fragments.
        bf16_flops_per_s: Peak of the matrix units in bf16.
        fp32_flops_per_s: Peak in fp32 (tf32 where the device has it).
        gemm_efficiency: Fraction of the peak that very large matrix products reach.
        attention_efficiency: Fraction of the peak that the attention forward reaches.
        attention_backward_efficiency: Fraction of the peak that the attention backward reaches.
        num_multiprocessors: Multiprocessors of a GPU; on a CPU, the number of threads that the
            rates hold for.
        memory_bytes_per_s: Bandwidth that element-wise kernels reach, reads and writes together.
        kernel_s: Fixed cost of one kernel: the part of its launch that is not hidden.
        document_forward_s: Seconds that a short document adds to an attention forward on a CPU,
            which computes documents one by one; 0 if not measured.
        document_backward_s: Seconds that a short document adds to an attention backward.
        rule_flops_per_s: Rate of the products of the gated delta rule of linear attention; 0 if not
            known, for that of matrix products.
        rule_step_s: Seconds of each chunk in a scan of that rule, which passes a state from chunk
            to chunk; 0 if not known.
        half_products: Whether a CPU multiplies bf16 matrices by oneDNN, which compiles code for
            every shape; otherwise tiles are cast to fp32 (:mod:`sppo.kernels.half_products`).
        gemm_points: Measured matrix products; if empty, `gemm_efficiency` is used.
        attention_points: Measured attention; if empty, `published_attention` or the efficiencies
            are used.
        elementwise_points: Measured element-wise kernels; if empty, `memory_bytes_per_s` is used.
        published_attention: Published attention rates in bf16, by back end and head size.
        attention_backend: Attention back end that predictions are for: that of the measured rates,
            or one in `published_attention`; if its rates are not known, the efficiencies predict
            attention. Empty if no back end is assumed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: DeviceKind
    memory_bytes: Annotated[int, Field(ge=1, le=1 << 60)]
    reserved_bytes: _Bytes
    bf16_flops_per_s: FlopsPerS
    fp32_flops_per_s: FlopsPerS
    gemm_efficiency: _Efficiency
    attention_efficiency: _Efficiency
    attention_backward_efficiency: _Efficiency
    num_multiprocessors: Annotated[int, Field(ge=0, le=1 << 30)]
    memory_bytes_per_s: BytesPerS
    kernel_s: _Seconds
    document_forward_s: _Seconds = 0.0
    document_backward_s: _Seconds = 0.0
    rule_flops_per_s: _OptionalRate = 0.0
    rule_step_s: _Seconds = 0.0
    half_products: bool = True
    gemm_points: Annotated[tuple[GemmPoint, ...], _MOST_POINTS] = ()
    attention_points: Annotated[tuple[AttentionPoint, ...], _MOST_POINTS] = ()
    elementwise_points: Annotated[tuple[ElementwisePoint, ...], _MOST_POINTS] = ()
    published_attention: tuple[PublishedAttention, ...] = ()
    attention_backend: str = ""

    def __post_init__(self) -> None:
        if self.attention_backend not in ("", *ATTENTION_BACKENDS):
            raise ValueError(
                f"hardware device.attention_backend is {quoted(self.attention_backend)}: it is one "
                f"of {', '.join(ATTENTION_BACKENDS)}, or empty"
            )
        _ = self._grids  # refuses holes

    @cached_property
    def _grids(self) -> Mapping[str, Mapping[tuple[Any, ...], Grid]]:
        """Measured rates by shape, by the name of the points and their keys."""
        return {name: rate_grids(name, getattr(self, name)) for name in GRIDS}

    @property
    def published_backends(self) -> tuple[str, ...]:
        """Attention back ends that have published rates on this device."""
        return tuple(dict.fromkeys(row.backend for row in self.published_attention))

    def published_rows(self) -> tuple[PublishedAttention, ...]:
        """Return the published rates of `attention_backend`, smallest head size first."""
        rows = [row for row in self.published_attention if row.backend == self.attention_backend]
        return tuple(sorted(rows, key=lambda row: row.head_size))

    @property
    def usable_bytes(self) -> int:
        """Device memory that a plan may fill, in bytes."""
        return max(0, self.memory_bytes - self.reserved_bytes)

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak FLOPs per second in `dtype`, "bf16" or "fp32"."""
        return self.bf16_flops_per_s if dtype == "bf16" else self.fp32_flops_per_s

    def measured_gemm(self, dtype: str) -> bool:
        """Return whether matrix products of `dtype` were measured."""
        return (dtype, "forward_flops_per_s") in self._grids["gemm_points"]

    def gemm_flops_per_s(
        self, dtype: str, *, tokens: Floats, width: float, product: Product = "forward"
    ) -> Floats:
        """Return the FLOPs per second of products of `tokens` rows with `width`-column matrices."""
        grid = self._grids["gemm_points"].get((dtype, f"{product}_flops_per_s"))
        if grid is not None:
            return grid.at(tokens, np.full_like(tokens, width))
        blocks = gemm_blocks(tokens, outputs=width)
        fill = wave_fill(blocks, num_multiprocessors=self.num_multiprocessors)
        rate: Floats = self.flops_per_s(dtype) * self.gemm_efficiency * fill
        return rate

    def attention_flops_per_s(
        self,
        dtype: str,
        *,
        queries: Floats,
        keys: Floats,
        heads: float,
        head_size: int = 128,
        backward: bool = False,
    ) -> Floats:
        """Return the FLOPs per second of attention of `queries` rows over `keys` keys.

        A forward has one thread block per tile of queries, a backward one per tile of keys: short
        subsequences of a long sequence leave only the forward without enough blocks.
        """
        rate = "backward_flops_per_s" if backward else "forward_flops_per_s"
        measured = {
            size: grid
            for (of, size, name), grid in self._grids["attention_points"].items()
            if (of, name) == (dtype, rate)
        }
        if measured:
            return attention_rates(measured, head_size=head_size, queries=queries, keys=keys)
        blocks = attention_blocks(keys if backward else queries, heads=heads)
        fill = wave_fill(blocks, num_multiprocessors=self.num_multiprocessors)
        if dtype == "bf16" and (rows := self.published_rows()):
            grids = {row.head_size: row.grid(backward=backward) for row in rows}
            rates = published_rates(grids, head_size=head_size, queries=queries, keys=keys)
            published_fill = wave_fill(
                np.array(float(PUBLISHED_BLOCKS)), num_multiprocessors=self.num_multiprocessors
            )
            return np.asarray(rates * np.minimum(1.0, fill / published_fill))
        efficiency = self.attention_backward_efficiency if backward else self.attention_efficiency
        estimate: Floats = self.flops_per_s(dtype) * efficiency * fill
        return estimate

    def document_seconds(self, dtype: str, *, queries: Floats, backward: bool) -> Floats:
        """Return the seconds of an attention call that the rates of longer spans leave out.

        Measured rates include the fixed cost of a call, in proportion to the pairs of the shortest
        measured span: of shorter spans, the rest of that cost is returned.
        """
        each_s = self.document_backward_s if backward else self.document_forward_s
        measured = [point.queries for point in self.attention_points if point.dtype == dtype]
        left_out = 1 - (queries / min(measured)) ** 2 if measured else np.zeros_like(queries)
        seconds: Floats = each_s * np.maximum(0.0, left_out)
        return seconds

    def elementwise_bytes_per_s(self, kernel: str, dtype: str, *, elements: Floats) -> Floats:
        """Return the bytes per second of an element-wise kernel on tensors of `elements` elements.

        The rate refers to the bytes that :mod:`sppo.cost.elementwise.layer_work` counts.
        """
        grid = self._grids["elementwise_points"].get((kernel, dtype, "bytes_per_s"))
        if grid is None:
            return np.full_like(elements, self.memory_bytes_per_s)
        return grid.at(elements, np.ones_like(elements))


Tier = Literal["device", "host", "disk"]
"""Kind of memory: of the device, of the host, or a file on a disk."""
HOST_FRACTION = 0.85
"""Fraction of the host memory behind GPUs that plans and training fill. The rest is for the
processes themselves, and for the page cache of files on their way to a disk."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Memory, disk and links that the devices of a node share.

    Attributes:
        num_devices: Number of devices per node.
        host_memory_bytes: Host memory of the node; in the description that a plan is made for
            (:func:`sppo.hardware.run_hardware.hardware_for`), the part of it that the plan may
            fill. 0 on a CPU, whose device memory is the host's.
        numa_nodes: Number of NUMA nodes; copies are fastest from the one nearest to the device.
        d2h_bytes_per_s: Rate of copies to the host per device, both directions busy.
        h2d_bytes_per_s: Rate of copies from the host per device, both directions busy.
        d2h_alone_bytes_per_s: Rate of copies to the host per device, the other direction idle.
        h2d_alone_bytes_per_s: Rate of copies from the host per device, the other direction idle.
        host_memory_bytes_per_s: Rate of copies to host memory, and at the same time of copies from
            it, of all devices of a node together; 0 if no bound is known.
        disk_bytes: Capacity of the node's disks; 0 without a disk tier.
        disk_write_bytes_per_s: Rate of writes past the page cache, all devices of a node together.
        disk_read_bytes_per_s: Rate of reads past the page cache, all devices of a node together.
        copy_compute_s_per_byte: Seconds by which each copied byte slows the compute that overlaps
            the copy, on one device; 0 where copies do not slow compute, or nothing was measured.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_devices: _Count
    host_memory_bytes: _Bytes
    numa_nodes: _Count
    d2h_bytes_per_s: _OptionalRate
    h2d_bytes_per_s: _OptionalRate
    d2h_alone_bytes_per_s: _OptionalRate
    h2d_alone_bytes_per_s: _OptionalRate
    host_memory_bytes_per_s: _OptionalRate = 0.0
    disk_bytes: _Bytes = 0
    disk_write_bytes_per_s: _OptionalRate = 0.0
    disk_read_bytes_per_s: _OptionalRate = 0.0
    copy_compute_s_per_byte: _SecondsPerByte = 0.0

    def __post_init__(self) -> None:
        copies = (
            (self.host_memory_bytes, min(self.d2h_bytes_per_s, self.h2d_bytes_per_s)),
            (self.disk_bytes, min(self.disk_write_bytes_per_s, self.disk_read_bytes_per_s)),
        )
        for there, slowest in copies:
            if there and slowest < _LEAST_RATE:
                raise ValueError(
                    f"copies of {slowest:g} bytes/s to a tier of {there} bytes: at least "
                    f"{_LEAST_RATE:g}, or no bytes"
                )

    @property
    def host_copy_bytes_per_s(self) -> tuple[float, float]:
        """Rates of copies (to host memory, back) per device while all devices of a node copy."""
        share = self.host_memory_bytes_per_s / self.num_devices or math.inf
        return min(self.d2h_bytes_per_s, share), min(self.h2d_bytes_per_s, share)

    @property
    def nearest_tier(self) -> Tier:
        """Tier next to the devices: host memory, else a disk, else "device" if there is neither."""
        if self.host_memory_bytes:
            return "host"
        return "disk" if self.disk_bytes else "device"


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """Links between devices, one direction each.

    Attributes:
        intra_node_bytes_per_s: Rate from one device to another of its node.
        intra_node_latency_s: Latency of a message inside a node.
        inter_node_bytes_per_s: Rate from one device to one of another node.
        inter_node_latency_s: Latency of a message between nodes.
        message_compute_s_per_byte: Compute seconds that a byte of a message takes on each end,
            where the device itself copies messages, as a CPU does.
        communicator_bytes: Device memory of a communicator (NCCL) whose ranks exchange messages
            with their neighbours, with as many thread blocks as it chooses; 0 without NCCL.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    intra_node_bytes_per_s: BytesPerS
    intra_node_latency_s: _Seconds
    inter_node_bytes_per_s: BytesPerS
    inter_node_latency_s: _Seconds
    message_compute_s_per_byte: _SecondsPerByte = 0.0
    communicator_bytes: _Bytes = 0


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """A cluster of equal nodes of equal devices.

    Attributes:
        name: Name of the machine in reports.
        provenance: Origin of the figures: measured, calibrated or analytic.
        device: Description of each device.
        node: Memory, disk and links that the devices of a node share.
        network: Links between devices.
        num_nodes: Number of nodes.
        sources: Source of the figures that were not measured, by figure (see `sppo solve
            --explain`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    provenance: Provenance
    device: DeviceSpec
    node: NodeSpec
    network: NetworkSpec
    num_nodes: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.num_devices > MOST_RANKS:
            raise ValueError(
                f"hardware: {self.num_nodes} nodes x {self.node.num_devices} devices are "
                f"{self.num_devices} devices, and at most {MOST_RANKS} can be planned for: lower "
                "hardware.nodes or hardware.devices_per_node"
            )

    @property
    def shown_name(self) -> str:
        """Name, without the preset nearest to a machine once its rates have been measured."""
        return self.name if self.provenance == "analytic" else _PRESET.sub("", self.name)

    @property
    def name_and_origin(self) -> str:
        """Name and origin of the rates: the preset nearest to a machine, or the provenance."""
        if _PRESET.search(self.shown_name):
            return self.name
        return f"{self.shown_name} ({self.provenance})"

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole cluster."""
        return self.num_nodes * self.node.num_devices

    @property
    def host_bytes_per_device(self) -> int:
        """Host memory of a node divided by its devices, in bytes; see `host_memory_bytes`."""
        return self.node.host_memory_bytes // self.node.num_devices

    @property
    def disk_bytes_per_device(self) -> int:
        """Disk capacity of a node divided by its devices, in bytes."""
        return self.node.disk_bytes // self.node.num_devices
