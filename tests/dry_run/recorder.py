"""Recorder of a step on a fake GPU: allocations, accesses of memory, and waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.dry_run.memory_ledger import MemoryLedger, byte_range, is_on_gpu, storage_key
from tests.dry_run.orderings import OrderingCheck
from tests.dry_run.streams import Runtime, Stream, Worker

_aten: Any = torch.ops.aten
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that allocate memory without writing it."""
_WRITTEN = {
    "_activation_kernel": {"hidden_ptr"},
    "_activation_backward_kernel": {"dhidden_ptr", "gate_ptr", "up_ptr"},
    "_cross_entropy_kernel": {"correct_ptr", "logits_ptr", "losses_ptr"},
    "_grouped_product_kernel": {"total_ptr"},
    "_merge_kernel": {"lse_ptr", "o_ptr"},
    "_norm_kernel": {"x_ptr", "y_ptr"},
    "_norm_backward_kernel": {"dbias_ptr", "dweight_ptr", "dx_ptr"},
    "_sink_gradient_kernel": {"partial_ptr"},
    "_turn_kernel": {"y_ptr"},
}
"""Parameters through which each Triton kernel writes; it reads through all others."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every operation on tensors, to be entered inside a FakeTensorMode.

    Args:
        runtime: Runtime that counts memory and has the current stream.
        orderings: Check that is given every access of memory; None for no check.
    """

    def __init__(self, runtime: Runtime, *, orderings: OrderingCheck | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runtime, self.orderings = runtime, orderings
        self.ledger = MemoryLedger(runtime, made=self._handed_out, freed=self._freed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and record its allocations and accesses."""
        named = dict(kwargs or {})
        out = self._run(func, args, named)
        if _moves_nothing(func):
            return out
        made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        for tensor in made:
            self.ledger.see(tensor)
        if func.overloadpacket.__name__ not in _ALLOCATIONS:
            self._take_in(func, args, named, made)
        return out

    def launch(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Record the launch of a Triton kernel.

        Args:
            kernel: A ``triton.jit`` function.
            arguments: Arguments by name of the parameter.
        """
        written = _WRITTEN[kernel.__name__]
        tensors = {name: x for name, x in arguments.items() if is_on_gpu(x)}
        self.work(
            kernel.__name__,
            reads=[x for name, x in tensors.items() if name not in written],
            writes=[x for name, x in tensors.items() if name in written],
        )

    def work(self, what: str, *, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Record a work item of the current stream that accesses tensors."""
        worker, number = self.runtime.issue()
        for tensor in reads:
            self._touch(tensor, worker, number, writes=False, what=what)
        for tensor in writes:
            self._touch(tensor, worker, number, writes=True, what=what)

    def host_work(self, what: str, *, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Record a work item of the current host thread that accesses host memory."""
        worker = self.runtime.host
        number = worker.work()
        for tensor in reads:
            self._touch(tensor, worker, number, writes=False, what=what)
        for tensor in writes:
            self._touch(tensor, worker, number, writes=True, what=what)

    def _run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if func is _aten.addmm.dtype_out:  # Fake tensors do not implement this overload.
            return named["out"]
        if func is _aten._local_scalar_dense.default:
            return 1
        return func(*args, **named)

    def _take_in(
        self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any], made: list[Tensor]
    ) -> None:
        reads, writes = _operands(func, args, named)
        given = {storage_key(x) for x in writes}
        writes += [x for x in made if storage_key(x) not in given]
        name = func.overloadpacket.__name__
        if any(is_on_gpu(x) for x in (*reads, *writes)):
            self.work(name, reads=reads, writes=writes)
            self._count_waits(name, args, named)
        else:
            self.host_work(name, reads=reads, writes=writes)

    def _count_waits(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Count a wait of the host for a copy between host and GPU that is not asynchronous."""
        if name == "copy_":
            target_on_gpu, source = is_on_gpu(args[0]), args[1]
            alone = args[2] if len(args) > 2 else named.get("non_blocking", False)
        elif name == "_to_copy" and named.get("device") is not None:
            target_on_gpu, source = torch.device(named["device"]).type == "cuda", args[0]
            alone = named.get("non_blocking", False)
        else:
            return
        if target_on_gpu == is_on_gpu(source):
            return
        if not target_on_gpu and not alone:
            self.runtime.wait_for_current("copy to the host")
        elif target_on_gpu and source.dim() and not self.ledger.is_page_locked(source):
            self.runtime.count_host_wait("copy from pageable memory")

    def _touch(
        self, tensor: Tensor, worker: Worker, number: int, *, writes: bool, what: str
    ) -> None:
        if self.orderings is not None and tensor.numel():
            self.orderings.touch(
                storage_key(tensor),
                byte_range(tensor),
                worker=worker,
                work=number,
                writes=writes,
                what=what,
            )

    def _handed_out(self, key: int, size_bytes: int, stream: Stream) -> None:
        if self.orderings is not None:
            stream.learn(self.runtime.host.clock)
            self.orderings.handed_out(key, size_bytes, stream)

    def _freed(self, key: int, stream: Stream | None) -> None:
        if self.orderings is None:
            return
        if stream is not None:
            stream.learn(self.runtime.host.clock)
        self.orderings.freed(key, stream)


@lru_cache(maxsize=1024)
def _moves_nothing(func: Any) -> bool:
    """Return whether an operation only makes a view or queries metadata."""
    if func.namespace == "prim":
        return True
    schema = func._schema
    lent = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return lent and not schema.is_mutable


def _operands(
    func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors among the arguments that are read, and those that are written."""
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False)]
    given += [(a, named[a.name]) for a in declared[len(args) :] if a.name in named]
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        found = writes if is_written else reads
        found += [x for x in tree_iter(value) if isinstance(x, Tensor)]
    return reads, writes
