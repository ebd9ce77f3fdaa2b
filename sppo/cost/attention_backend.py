"""Attention back end that a plan assumes, chosen without access to the machine of the run."""

from __future__ import annotations

from sppo.cost.workload import Workload

_MOST_HEAD_SIZE = {"cudnn": 128, "flash_attn_4": 128}
_FLASH_HEAD_SIZE, _FLASH_MULTIPLE = 256, 8
_HALF_BYTES = 2


def planned_backend(workload: Workload) -> str:
    """Return the back end that the device names, or its fallback; a CPU has one back end.

    The fallback is torch's flash-attn 2 if the device names no back end, or one that does not
    support the head size or the sliding window; and blocks in plain torch operations if no flash
    kernel supports the dtype and the head size. On the machine,
    :mod:`sppo.kernels.attention.choice` chooses.
    """
    model, named = workload.model, workload.hardware.device.attention_backend
    if workload.hardware.device.kind == "cpu":
        return "cpu_flash"
    size = model.head_dim
    flash = workload.element_bytes == _HALF_BYTES and size % _FLASH_MULTIPLE == 0
    if named == "torch_blocks" or not flash or size > _FLASH_HEAD_SIZE:
        return "torch_blocks"
    too_large = size > _MOST_HEAD_SIZE.get(named, _FLASH_HEAD_SIZE)
    if not named or too_large or (named == "cudnn" and model.sliding_window is not None):
        return "torch_flash"
    return named
