"""Hardware presets of common GPU machines and a laptop, with *analytic* rates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sppo.hardware.description import DeviceSpec, HardwareSpec, NetworkSpec, NodeSpec
from sppo.hardware.preset_attention import AMPERE, BLACKWELL, HOPPER
from sppo.hardware.published_attention import PublishedAttention
from sppo.units import GIB, MIB

_GB = 1e9
_TFLOPS = 1e12


def _accelerator(
    name: str,
    *,
    memory: tuple[int, float],
    links: tuple[float, float],
    bf16_tflops: float,
    fp32_tflops: float,
    gemm_efficiency: float,
    multiprocessors: int,
    pcie_gb_per_s: tuple[float, float],
    attention: tuple[PublishedAttention, ...],
    attention_backend: str,
) -> HardwareSpec:
    both, alone = (rate * _GB for rate in pcie_gb_per_s)
    device = DeviceSpec(
        kind="cuda",
        memory_bytes=memory[0] * GIB,
        reserved_bytes=4 * GIB,
        bf16_flops_per_s=bf16_tflops * _TFLOPS,
        fp32_flops_per_s=fp32_tflops * _TFLOPS,
        gemm_efficiency=gemm_efficiency,
        attention_efficiency=0.5,
        attention_backward_efficiency=0.4,
        num_multiprocessors=multiprocessors,
        memory_bytes_per_s=0.8 * memory[1] * _GB,
        kernel_s=3e-6,
        published_attention=attention,
        attention_backend=attention_backend,
    )
    node = NodeSpec(
        num_devices=8,
        host_memory_bytes=2048 * GIB,
        numa_nodes=2,
        d2h_bytes_per_s=both,
        h2d_bytes_per_s=both,
        d2h_alone_bytes_per_s=alone,
        h2d_alone_bytes_per_s=alone,
    )
    network = NetworkSpec(
        intra_node_bytes_per_s=links[0] * _GB,
        intra_node_latency_s=10e-6,
        inter_node_bytes_per_s=links[1] * _GB,
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

_AMPERE = partial(
    _accelerator, bf16_tflops=312, fp32_tflops=19.5, gemm_efficiency=0.78, multiprocessors=108,
    pcie_gb_per_s=(22, 25), attention=AMPERE, attention_backend="flash_attn_2",
)  # fmt: skip
_HOPPER = partial(
    _accelerator, bf16_tflops=989, fp32_tflops=67, gemm_efficiency=0.76, multiprocessors=132,
    pcie_gb_per_s=(45, 52), attention=HOPPER, attention_backend="cudnn",
)  # fmt: skip
_BLACKWELL = partial(
    _accelerator, bf16_tflops=2250, fp32_tflops=75, gemm_efficiency=0.635, multiprocessors=148,
    pcie_gb_per_s=(50, 58), attention=BLACKWELL, attention_backend="flash_attn_4",
)  # fmt: skip

# Memory in GiB and GB/s; links inside and between nodes in GB/s, per direction and device. Sources
# are in :mod:`sppo.hardware.preset_sources`.
PRESETS: Mapping[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        _AMPERE("a100-40g", memory=(40, 1555), links=(235, 12.5)),
        _AMPERE("a100-80g", memory=(80, 2039), links=(235, 12.5)),
        _AMPERE("a800-40g", memory=(40, 1555), links=(157, 6.25)),
        _AMPERE("a800", memory=(80, 2039), links=(157, 12.5)),
        _HOPPER("h100", memory=(80, 3350), links=(353, 45)),
        _HOPPER("h200", memory=(141, 4800), links=(353, 45)),
        _BLACKWELL("b200", memory=(180, 8000), links=(706, 45)),
        _LAPTOP,
    )
}
