"""Hardware presets of common GPU machines and a laptop, with *analytic* rates."""

from __future__ import annotations

from collections.abc import Mapping

from sppo.hardware.description import DeviceSpec, HardwareSpec, NetworkSpec, NodeSpec
from sppo.hardware.preset_attention import AMPERE, BLACKWELL, HOPPER
from sppo.hardware.published_attention import PublishedAttention
from sppo.units import GIB, MIB

_GB = 1e9
_TFLOPS = 1e12


def _accelerator(
    name: str,
    *,
    memory_gib: int,
    bf16_tflops: float,
    fp32_tflops: float,
    gemm_efficiency: float,
    memory_gb_per_s: float,
    multiprocessors: int,
    pcie_gb_per_s: tuple[float, float],
    nvlink_gb_per_s: float,
    network_gb_per_s: float,
    attention: tuple[PublishedAttention, ...],
    attention_backend: str,
    host_gib: int = 2048,
) -> HardwareSpec:
    both, alone = (rate * _GB for rate in pcie_gb_per_s)
    device = DeviceSpec(
        kind="cuda",
        memory_bytes=memory_gib * GIB,
        reserved_bytes=4 * GIB,
        bf16_flops_per_s=bf16_tflops * _TFLOPS,
        fp32_flops_per_s=fp32_tflops * _TFLOPS,
        gemm_efficiency=gemm_efficiency,
        attention_efficiency=0.5,
        attention_backward_efficiency=0.4,
        num_multiprocessors=multiprocessors,
        memory_bytes_per_s=0.8 * memory_gb_per_s * _GB,
        kernel_s=3e-6,
        published_attention=attention,
        attention_backend=attention_backend,
    )
    node = NodeSpec(
        num_devices=8,
        host_memory_bytes=host_gib * GIB,
        numa_nodes=2,
        d2h_bytes_per_s=both,
        h2d_bytes_per_s=both,
        d2h_alone_bytes_per_s=alone,
        h2d_alone_bytes_per_s=alone,
    )
    network = NetworkSpec(
        intra_node_bytes_per_s=nvlink_gb_per_s * _GB,
        intra_node_latency_s=10e-6,
        inter_node_bytes_per_s=network_gb_per_s * _GB,
        inter_node_latency_s=25e-6,
        communicator_bytes=656 * MIB,
    )
    return HardwareSpec(name, "analytic", device, node, network)


_LAPTOP = HardwareSpec(
    "laptop-cpu",
    "analytic",
    DeviceSpec(
        kind="cpu",
        memory_bytes=16 * GIB,
        reserved_bytes=2 * GIB,
        bf16_flops_per_s=2e11,
        fp32_flops_per_s=1e11,
        gemm_efficiency=0.6,
        attention_efficiency=0.3,
        attention_backward_efficiency=0.25,
        num_multiprocessors=2,
        memory_bytes_per_s=10 * _GB,
        kernel_s=10e-6,
    ),
    NodeSpec(
        num_devices=1,
        host_memory_bytes=0,
        numa_nodes=1,
        d2h_bytes_per_s=0.0,
        h2d_bytes_per_s=0.0,
        d2h_alone_bytes_per_s=0.0,
        h2d_alone_bytes_per_s=0.0,
        disk_bytes=64 * GIB,
        disk_write_bytes_per_s=1 * _GB,
        disk_read_bytes_per_s=1.5 * _GB,
    ),
    NetworkSpec(
        intra_node_bytes_per_s=2 * _GB,
        intra_node_latency_s=50e-6,
        inter_node_bytes_per_s=0.1 * _GB,
        inter_node_latency_s=200e-6,
    ),
)

# Bandwidths are per direction and device. Sources are in :mod:`sppo.hardware.preset_sources`.
PRESETS: Mapping[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        _accelerator(
            "a100-40g", memory_gib=40, bf16_tflops=312, fp32_tflops=19.5, gemm_efficiency=0.78,
            memory_gb_per_s=1555, multiprocessors=108, pcie_gb_per_s=(22, 25), nvlink_gb_per_s=235,
            network_gb_per_s=12.5, attention=AMPERE, attention_backend="flash_attn_2",
        ),
        _accelerator(
            "a100-80g", memory_gib=80, bf16_tflops=312, fp32_tflops=19.5, gemm_efficiency=0.78,
            memory_gb_per_s=2039, multiprocessors=108, pcie_gb_per_s=(22, 25), nvlink_gb_per_s=235,
            network_gb_per_s=12.5, attention=AMPERE, attention_backend="flash_attn_2",
        ),
        _accelerator(
            "a800-40g", memory_gib=40, bf16_tflops=312, fp32_tflops=19.5, gemm_efficiency=0.78,
            memory_gb_per_s=1555, multiprocessors=108, pcie_gb_per_s=(22, 25), nvlink_gb_per_s=157,
            network_gb_per_s=6.25, attention=AMPERE, attention_backend="flash_attn_2",
        ),
        _accelerator(
            "a800", memory_gib=80, bf16_tflops=312, fp32_tflops=19.5, gemm_efficiency=0.78,
            memory_gb_per_s=2039, multiprocessors=108, pcie_gb_per_s=(22, 25), nvlink_gb_per_s=157,
            network_gb_per_s=12.5, attention=AMPERE, attention_backend="flash_attn_2",
        ),
        _accelerator(
            "h100", memory_gib=80, bf16_tflops=989, fp32_tflops=67, gemm_efficiency=0.76,
            memory_gb_per_s=3350, multiprocessors=132, pcie_gb_per_s=(45, 52), nvlink_gb_per_s=353,
            network_gb_per_s=45, attention=HOPPER, attention_backend="cudnn",
        ),
        _accelerator(
            "h200", memory_gib=141, bf16_tflops=989, fp32_tflops=67, gemm_efficiency=0.76,
            memory_gb_per_s=4800, multiprocessors=132, pcie_gb_per_s=(45, 52), nvlink_gb_per_s=353,
            network_gb_per_s=45, attention=HOPPER, attention_backend="cudnn",
        ),
        _accelerator(
            "b200", memory_gib=180, bf16_tflops=2250, fp32_tflops=75, gemm_efficiency=0.635,
            memory_gb_per_s=8000, multiprocessors=148, pcie_gb_per_s=(50, 58), nvlink_gb_per_s=706,
            network_gb_per_s=45, attention=BLACKWELL, attention_backend="flash_attn_4",
        ),
        _LAPTOP,
    )
}  # fmt: skip
