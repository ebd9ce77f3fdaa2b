"""Replacements for tensor functions that torch's Python bindings refuse without a CUDA device.

A build of torch for CPUs refuses some functions of fake tensors on a GPU before FakeTensorMode is
called. They are implemented here with operations that all builds support. Reading a value, which
fake tensors do not have, returns 1, and from a GPU counts as a wait of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.dry_run.memory_ledger import is_on_gpu, storage_key
from tests.dry_run.recorder import Recorder

_aten: Any = torch.ops.aten
_VALUES: Mapping[Any, object] = {
    Tensor.__float__: 1.0,
    Tensor.__int__: 1,
    Tensor.__bool__: True,
    Tensor.__index__: 1,
    Tensor.item: 1.0,
}
_CASTS: Mapping[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
    Tensor.int: torch.int32,
    Tensor.long: torch.int64,
    Tensor.bool: torch.bool,
}


class DevicelessFunctions(TorchFunctionMode):
    """Mode that replaces functions of fake tensors which a CPU build of torch refuses.

    Args:
        recorder: Recorder of waits of the host and of accesses of host memory.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._runtime = recorder, recorder.runtime
        ledger = recorder.ledger
        self._others: dict[Any, Callable[..., Any]] = {
            Tensor.__getitem__: indexed,
            Tensor.__setitem__: _assign,
            Tensor.__invert__: _aten.bitwise_not.default,
            Tensor.copy_: _copy,
            Tensor.contiguous: _contiguous,
            Tensor.to: _to,
            Tensor.cpu: lambda x: _cast(x, device="cpu"),
            Tensor.numpy: HostBytes,
            Tensor.pin_memory: lambda x: ledger.page_lock(x.clone()),
            Tensor.is_pinned: lambda x, device=None: ledger.is_page_locked(x),
            Tensor.data_ptr: _address,
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or its replacement for fake tensors."""
        named = dict(kwargs or {})
        if func in _VALUES and _is_fake(args[0]):
            if is_on_gpu(args[0]):
                self._runtime.wait_for_current(f"{func.__name__}()")
            self._recorder.host_work("reading a value", reads=args[:1], writes=[])
            return _VALUES[func]
        if func in _CASTS and _is_fake(args[0]):
            return _cast(args[0], dtype=_CASTS[func])
        other = self._others.get(func)
        if other is not None and _is_fake(args[0]):
            return other(*args, **named)
        return func(*args, **named)


class HostBytes:
    """Fake NumPy array of host memory, which can be sliced and filled.

    Attributes:
        tensor: Fake tensor of the memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, part: slice) -> HostBytes:
        return HostBytes(indexed(self.tensor, part))

    def fill(self, value: int) -> None:
        """Fill the memory with ``value``."""
        self.tensor.fill_(value)


def indexed(x: Tensor, index: Any) -> Tensor:
    """Return ``x[index]`` for integers, slices, None, Ellipsis and tensors of indices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        missing = x.dim() - sum(part is not None for part in parts) + 1
        parts[at : at + 1] = [slice(None)] * missing
    tensors: dict[int, Tensor] = {}
    dimension = 0
    for part in parts:
        if part is None:
            x = x.unsqueeze(dimension)
        elif isinstance(part, slice):
            x = _aten.slice.Tensor(x, dimension, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            tensors[dimension] = part
        else:
            x = _aten.select.int(x, dimension, int(part))
            continue
        dimension += 1
    if not tensors:
        return x
    found: Tensor = _aten.index.Tensor(x, [tensors.get(d) for d in range(max(tensors) + 1)])
    return found


def _is_fake(value: object) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "fake_mode")


def _address(x: Tensor) -> int:
    """Return a fake address, which tensors of other storages do not have while this one lives."""
    return storage_key(x) + int(x.storage_offset()) * x.element_size()


def _assign(x: Tensor, index: Any, value: Any) -> None:
    target = indexed(x, index)
    if isinstance(value, Tensor):
        _aten.copy_.default(target, value)
    else:
        target.fill_(value)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copied: Tensor = _aten.copy_.default(target, source, non_blocking)
    return copied


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if x.is_contiguous():
        return x
    dense: Tensor = _aten.clone.default(x, memory_format=memory_format)
    return dense


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for value in args:
        if isinstance(value, torch.dtype):
            kwargs["dtype"] = value
        elif isinstance(value, Tensor):
            kwargs |= {"dtype": value.dtype, "device": value.device}
        elif isinstance(value, str | torch.device):
            kwargs["device"] = value
    return _cast(x, **kwargs)


def _cast(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> Tensor:
    dtype, place = dtype or x.dtype, torch.device(device or x.device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", 0)
    if dtype == x.dtype and place == x.device and not copy:
        return x
    copied: Tensor = _aten._to_copy.default(x, dtype=dtype, device=place, non_blocking=non_blocking)
    return copied
