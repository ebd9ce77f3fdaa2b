"""Attention back end that a plan counts on, without asking the machine, which may be elsewhere."""

from __future__ import annotations

from sppo.cost.layer import Workload

_MOST_HEAD_SIZE = {"cudnn": 128, "flash_attn_4": 128}
_FLASH_HEAD_SIZE, _FLASH_MULTIPLE = 256, 8
_HALF_BYTES = 2


def planned_backend(workload: Workload) -> str:
    """Return the back end that the device's attention rates are of, or what takes its place.

    That is the flash-attn 2 of torch where the device names none or the named one cannot do the
    heads or the window, and the Triton kernels where no flash kernel takes the dtype or the heads.
    :mod:`sppo.kernels.attention.choice` chooses on the machine itself.
    """
    model, named = workload.model, workload.hardware.device.attention_backend
    size = model.head_dim
    flash = workload.element_bytes == _HALF_BYTES and size % _FLASH_MULTIPLE == 0
    if not flash or size > _FLASH_HEAD_SIZE:
        return "triton"
    too_large = size > _MOST_HEAD_SIZE.get(named, _FLASH_HEAD_SIZE)
    if not named or too_large or (named == "cudnn" and model.sliding_window is not None):
        return "torch_flash"
    return named
