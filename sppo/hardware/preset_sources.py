"""Sources of the figures of hardware presets."""

from __future__ import annotations

from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS

_SUSTAINED = (
    "long matrix products at the power limit: 755 of 989 TFLOP/s on H200, 1429 of 2250 on B200 "
    "(mamf-finder, Machine Learning Engineering by S. Bekman)"
)
_SUSTAINED_A100 = (
    "best matrix product 268 of 312 TFLOP/s (mamf-finder, Machine Learning Engineering by S. "
    "Bekman), times the 0.905 that an H200 keeps at its power limit"
)
_MEMORY = "0.8 of the vendor's bandwidth, assumed"
_PCIE = (
    "nvbandwidth reaches 24.8 GB/s on PCIe 4 (A100) with one direction busy; with both, and on "
    "PCIe 5, assumed"
)
_NVLINK = (
    "0.78 of the vendor's figure per direction, as nccl-tests reach on an A100 node (235 GB/s)"
)
_NETWORK = {
    "a100": "4 x 200 Gb/s for 8 devices, as in the SPPO paper",
    "a800-40g": "400 Gb/s for 8 devices, as in the InfiniPipe paper",
    "later": "0.9 of one 400 Gb/s port per device, assumed",
}
_LAPTOP = "assumed; sppo bench measures this machine"


def source_of(hardware: HardwareSpec, figure: str, *, dtype: str, head_size: int) -> str:
    """Return the source of a figure of a machine, as text.

    Args:
        hardware: Machine that has the figure.
        figure: "matrix products", "attention", "memory bandwidth", "links inside a node", "links
            between nodes", "copies to and from host memory" or "copies to a disk".
        dtype: Type of the matrix products, attention or element-wise kernels.
        head_size: Elements per attention head.
    """
    device = hardware.device
    measured = {
        "matrix products": {point.dtype for point in device.gemm_points},
        "attention": {point.dtype for point in device.attention_points},
        "memory bandwidth": {point.dtype for point in device.elementwise_points},
    }
    if dtype in measured.get(figure, ()):
        return "measured by sppo bench"
    if device.kind == "cpu":
        return _LAPTOP
    if dtype != "bf16" and figure in ("matrix products", "attention"):
        return "fp32 without TF32, by the vendor; the share of it that kernels reach is assumed"
    if figure == "attention":
        rows = device.published_rows()
        meant = [row for row in rows if row.head_size == head_size] or rows
        return "; ".join(dict.fromkeys(row.source for row in meant)) or "assumed"
    # The name of a detected machine ends with the preset that its figures are from.
    ends = {name: (f"preset {name})", f"by memory: {name})") for name in PRESETS}
    preset = next(
        (n for n, end in ends.items() if hardware.name == n or hardware.name.endswith(end)), None
    )
    if preset is None:
        return "its hardware file"
    ampere = preset.startswith(("a100", "a800"))
    return {
        "matrix products": _SUSTAINED_A100 if ampere else _SUSTAINED,
        "memory bandwidth": _MEMORY,
        "copies to and from host memory": _PCIE,
        "copies to a disk": _LAPTOP,
        "links inside a node": _NVLINK,
        "links between nodes": _NETWORK.get(preset, _NETWORK["a100" if ampere else "later"]),
    }[figure]
