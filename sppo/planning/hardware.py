"""The machine a plan is made for: what its devices, links and copies can do.

Presets are *analytic*: vendors' figures, times the share of them that well-made kernels reach on
long sequences. `sppo bench` writes a file with what a machine measures; plans prefer that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from sppo.config.run import HardwareConfig
from sppo.units import GIB

Provenance = Literal["measured", "calibrated", "analytic"]

_GB = 1e9
_TFLOPS = 1e12


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """A cluster of equal nodes of equal devices.

    Attributes:
        name: What reports call it.
        provenance: Where the figures come from.
        device_memory_bytes: Of one device; on a CPU, the memory of the machine.
        bf16_flops_per_s: Peak of one device's matrix units in bf16.
        fp32_flops_per_s: The same in fp32 (tf32 where the device has it).
        gemm_efficiency: Share of the peak that long matrix products reach.
        attention_efficiency: Share of it that the attention forward reaches.
        attention_backward_efficiency: Share of it that the attention backward reaches.
        half_efficiency_tokens: Tokens per kernel at which half of these shares is left; kernels
            of C tokens reach C / (C + this) of them.
        d2h_bytes_per_s: Copies to the host, both directions busy, per device.
        h2d_bytes_per_s: Copies back, both directions busy, per device.
        host_memory_bytes: Of one node, for all its devices.
        intra_node_bytes_per_s: From one device to another of its node, one direction.
        intra_node_latency_s: Of a message inside a node.
        inter_node_bytes_per_s: From one device to one of another node, one direction.
        inter_node_latency_s: Of a message between nodes.
        devices_per_node: Devices of a node.
        num_nodes: Nodes.
    """

    name: str
    provenance: Provenance
    device_memory_bytes: int
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    gemm_efficiency: float
    attention_efficiency: float
    attention_backward_efficiency: float
    half_efficiency_tokens: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    host_memory_bytes: int
    intra_node_bytes_per_s: float
    intra_node_latency_s: float
    inter_node_bytes_per_s: float
    inter_node_latency_s: float
    devices_per_node: int = 8
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"hardware {field.name} is {value}: must be at least 0")
        for name in ("gemm_efficiency", "attention_efficiency", "attention_backward_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"hardware {name} is {getattr(self, name)}: must be within 0 and 1"
                )

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.num_nodes * self.devices_per_node

    def flops_per_s(self, dtype: str) -> float:
        """Peak of one device for `dtype`, "bf16" or "fp32"."""
        return self.bf16_flops_per_s if dtype == "bf16" else self.fp32_flops_per_s


def _accelerator(
    name: str,
    *,
    memory_gib: int,
    bf16_tflops: float,
    fp32_tflops: float,
    pcie_gb_per_s: float,
    nvlink_gb_per_s: float,
    network_gb_per_s: float,
    attention: tuple[float, float] = (0.6, 0.5),
    host_gib: int = 2048,
) -> HardwareSpec:
    return HardwareSpec(
        name=name,
        provenance="analytic",
        device_memory_bytes=memory_gib * GIB,
        bf16_flops_per_s=bf16_tflops * _TFLOPS,
        fp32_flops_per_s=fp32_tflops * _TFLOPS,
        gemm_efficiency=0.75,
        attention_efficiency=attention[0],
        attention_backward_efficiency=attention[1],
        half_efficiency_tokens=256,
        d2h_bytes_per_s=pcie_gb_per_s * _GB,
        h2d_bytes_per_s=pcie_gb_per_s * _GB,
        host_memory_bytes=host_gib * GIB,
        intra_node_bytes_per_s=nvlink_gb_per_s * _GB,
        intra_node_latency_s=10e-6,
        inter_node_bytes_per_s=network_gb_per_s * _GB,
        inter_node_latency_s=25e-6,
    )


# Bandwidths are per direction and device. A100 nodes have 4 x 200 Gb/s for 8 devices, as in the
# SPPO paper; H100-class nodes one 400 Gb/s port per device. PCIe is what a pinned copy reaches
# with both directions busy, not the bus figure.
PRESETS: Mapping[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        _accelerator(
            "a100-40g", memory_gib=40, bf16_tflops=312, fp32_tflops=156,
            pcie_gb_per_s=22, nvlink_gb_per_s=250, network_gb_per_s=12.5,
        ),
        _accelerator(
            "a100-80g", memory_gib=80, bf16_tflops=312, fp32_tflops=156,
            pcie_gb_per_s=22, nvlink_gb_per_s=250, network_gb_per_s=12.5,
        ),
        _accelerator(
            "a800", memory_gib=80, bf16_tflops=312, fp32_tflops=156,
            pcie_gb_per_s=22, nvlink_gb_per_s=170, network_gb_per_s=12.5,
        ),
        _accelerator(
            "h100", memory_gib=80, bf16_tflops=989, fp32_tflops=494,
            pcie_gb_per_s=45, nvlink_gb_per_s=380, network_gb_per_s=45,
            attention=(0.55, 0.42),
        ),
        _accelerator(
            "h200", memory_gib=141, bf16_tflops=989, fp32_tflops=494,
            pcie_gb_per_s=45, nvlink_gb_per_s=380, network_gb_per_s=45,
            attention=(0.55, 0.42),
        ),
        _accelerator(
            "b200", memory_gib=180, bf16_tflops=2250, fp32_tflops=1125,
            pcie_gb_per_s=50, nvlink_gb_per_s=760, network_gb_per_s=45,
            attention=(0.5, 0.38),
        ),
        HardwareSpec(
            name="laptop-cpu", provenance="analytic", device_memory_bytes=16 * GIB,
            bf16_flops_per_s=2e11, fp32_flops_per_s=1e11, gemm_efficiency=0.6,
            attention_efficiency=0.3, attention_backward_efficiency=0.25,
            half_efficiency_tokens=32, d2h_bytes_per_s=1.5e9, h2d_bytes_per_s=1.5e9,
            host_memory_bytes=0, intra_node_bytes_per_s=2e9, intra_node_latency_s=50e-6,
            inter_node_bytes_per_s=1e8, inter_node_latency_s=200e-6, devices_per_node=2,
        ),
    )
}  # fmt: skip


def hardware_for(config: Literal["auto"] | HardwareConfig) -> HardwareSpec:
    """The machine a run file names; "auto" is a laptop until something is measured.

    Raises:
        ValueError: an unknown preset, or a file that is no hardware description.
    """
    if config == "auto":
        return PRESETS["laptop-cpu"]
    if config.file is not None:
        return read_hardware(Path(config.file))
    name = config.preset or "laptop-cpu"
    if name not in PRESETS:
        raise ValueError(f"hardware.preset {name!r} is not one of {', '.join(PRESETS)}")
    return replace(PRESETS[name], num_nodes=config.nodes, devices_per_node=config.devices_per_node)


def read_hardware(path: Path) -> HardwareSpec:
    """A hardware description from a JSON file with the fields of `HardwareSpec`.

    Raises:
        ValueError: not JSON, or a field is missing or unknown; names them.
        OSError: the file cannot be read.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"hardware file {path} is not JSON: {error}") from error
    known = {field.name for field in fields(HardwareSpec)}
    if not isinstance(values, dict) or set(values) - known:
        extra = sorted(set(values) - known) if isinstance(values, dict) else ["no object"]
        raise ValueError(f"hardware file {path}: unknown {', '.join(extra)}; see sppo bench all")
    missing = sorted(known - set(values) - {"devices_per_node", "num_nodes"})
    if missing:
        raise ValueError(f"hardware file {path}: {', '.join(missing)} missing; see sppo bench all")
    return HardwareSpec(**values)
