r"""Compare the torch calls of the CUDA path with the installed torch; needs no GPU.

Operators are compared by schema: the installed operator must accept every call that the expected
schema accepts. Functions and classes are compared by the arguments that SPPO passes, other objects
by name. If torch is built without CUDA, its runtime, NCCL and CUDA kernels are not compared, and
the output says so. The exit code is 1 if anything is missing or different.

    python scripts/torch_signatures.py
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed

CUDA_OPERATORS = (
    "_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, "
    "Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None) -> (Tensor output, Tensor softmax_logsumexp, "
    "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, "
    "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None) "
    "-> (Tensor, Tensor, Tensor)",
    "_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, "
    "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, "
    "Tensor philox_offset, Tensor debug_attn_mask)",
    "_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, "
    "Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)",
    "addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, "
    "Scalar beta=1, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)",
    "_fused_adamw_(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor[] state_steps, *, float lr, "
    "float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, "
    "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()",
    "_foreach_copy_(Tensor(a!)[] self, Tensor[] src, bool non_blocking=False) -> ()",
    "_foreach_mul_.Tensor(Tensor(a!)[] self, Tensor other) -> ()",
    "_foreach_zero_(Tensor(a!)[] self) -> ()",
    "silu_backward(Tensor grad_output, Tensor self) -> Tensor",
    "gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor",
    "native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, "
    "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) "
    "-> (Tensor, Tensor, Tensor)",
)
"""Operators that run on a GPU, as SPPO calls them (schemas of torch 2.11)."""
CPU_OPERATORS = (
    "_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
    "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
    "-> (Tensor output, Tensor logsumexp)",
    "_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, "
    "Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, "
    "Tensor grad_value)",
)
"""Operators that run on a CPU, as SPPO calls them (schemas of torch 2.11)."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments with which SPPO calls a function or class."""

    positional: int = 0
    keywords: tuple[str, ...] = ()


CALLS: Mapping[str, Call] = {
    "cuda.Stream": Call(1),
    "cuda.Event": Call(0, ("enable_timing", "blocking")),
    "cuda.current_stream": Call(1),
    "cuda.stream": Call(1),
    "cuda.synchronize": Call(1),
    "cuda.set_device": Call(1),
    "cuda.device": Call(1),
    "cuda.device_count": Call(),
    "cuda.is_available": Call(),
    "cuda.get_device_name": Call(1),
    "cuda.get_device_capability": Call(1),
    "cuda.get_device_properties": Call(1),
    "cuda.empty_cache": Call(),
    "cuda.memory_allocated": Call(1),
    "cuda.memory_reserved": Call(1),
    "cuda.max_memory_allocated": Call(1),
    "cuda.max_memory_reserved": Call(1),
    "cuda.reset_peak_memory_stats": Call(1),
    "cuda.mem_get_info": Call(1),
    "cuda.cudart": Call(),
    "cuda._sleep": Call(1),
    "optim.adamw.adamw": Call(
        6,
        ("fused", "amsgrad", "beta1", "beta2", "lr", "weight_decay", "eps", "maximize"),
    ),
    "distributed.init_process_group": Call(1, ("store", "rank", "world_size", "timeout")),
    "distributed.new_group": Call(
        1,
        (
            "timeout",
            "backend",
            "pg_options",
            "use_local_synchronization",
            "group_desc",
            "device_id",
        ),
    ),
    "distributed.isend": Call(1, ("group", "group_dst")),
    "distributed.irecv": Call(1, ("group", "group_src")),
    "distributed.all_reduce": Call(1, ("op", "group", "async_op")),
    "distributed.broadcast": Call(2, ("group", "async_op")),
    "distributed.reduce": Call(2, ("group", "async_op")),
    "distributed.all_to_all_single": Call(2, ("output_split_sizes", "input_split_sizes", "group")),
}
"""Functions and classes below ``torch``, and the arguments that SPPO passes."""
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "cuda.Stream": ("wait_event", "wait_stream", "synchronize", "query"),
    "cuda.Event": ("record", "wait", "query", "synchronize", "elapsed_time"),
}
"""Attributes that objects below ``torch`` must have."""
CUDA_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "cuda.Stream": ("cuda_stream",),
    "_C._cudart": ("cudaHostRegister", "cudaHostUnregister", "cudaGetErrorString", "cudaError"),
    "_C._CudaDeviceProperties": ("total_memory", "pci_domain_id", "pci_bus_id", "pci_device_id"),
    "distributed.ProcessGroupNCCL": ("Options",),
}
"""Attributes that objects below ``torch`` must have in builds with CUDA."""


@dataclass
class Findings:
    """Number of equal calls, differences, and calls that could not be compared."""

    same: int = 0
    different: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, what: str, difference: str | None) -> None:
        """Count ``what`` as equal if ``difference`` is None, otherwise record the difference."""
        if difference is None:
            self.same += 1
        else:
            self.different.append(f"{what}: {difference}")


def main() -> None:
    """Compare and print differences; the exit code is 1 if there are any."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    findings = compare()
    for line in findings.different:
        print(line)
    for line in findings.left_out:
        print(f"not compared: {line}")
    found = f"{findings.same} calls as expected, {len(findings.different)} different"
    print(f"torch {torch.__version__}: {found}")
    if findings.different:
        raise SystemExit(1)


def compare() -> Findings:
    """Compare everything that this build of torch has."""
    findings = Findings()
    for schema in (*CUDA_OPERATORS, *CPU_OPERATORS):
        findings.add(f"aten::{_name(schema)}", operator_difference(schema))
    for name, call in CALLS.items():
        findings.add(f"torch.{name}", call_difference(_below_torch(name), call))
    _compare_names(findings, ATTRIBUTES)
    for what, difference in _shapes():
        findings.add(what, difference)
    if torch.version.cuda is None:
        findings.left_out.append("kernels for CUDA, its runtime and NCCL, which this torch lacks")
        return findings
    for schema in CUDA_OPERATORS:
        findings.add(f"aten::{_name(schema)} on CUDA", _kernel_difference(_name(schema)))
    _compare_names(findings, CUDA_ATTRIBUTES)
    findings.add("options of NCCL", _nccl_difference())
    return findings


def operator_difference(expected: str) -> str | None:
    """Return why an operator cannot be called by the ``expected`` schema; None if it can."""
    name, _, overload = _name(expected).partition(".")
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload or "default", None)
    if found is None:
        return "is not there"
    if found._schema.is_backward_compatible_with(torch._C.parse_schema(f"aten::{expected}")):
        return None
    return f"is now {found._schema}"


def call_difference(called: Any, call: Call) -> str | None:
    """Return why ``called`` does not accept ``call``; None if it does, or has no signature."""
    if called is None:
        return "is not there"
    own = called.__new__ if _reads_in_new(called) else called
    try:
        signature = inspect.signature(own)
    except ValueError:
        return None
    first = [None] if own is not called else []
    try:
        signature.bind(*first, *[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return None


def _reads_in_new(called: Any) -> bool:
    """Return whether a class reads its arguments in ``__new__``."""
    return inspect.isclass(called) and inspect.isfunction(vars(called).get("__new__"))


def _compare_names(findings: Findings, names: Mapping[str, tuple[str, ...]]) -> None:
    for owner, wanted in names.items():
        there = _below_torch(owner)
        for name in wanted:
            difference = None if hasattr(there, name) else "is not there"
            findings.add(f"torch.{owner}.{name}", difference)


def _below_torch(name: str) -> Any:
    """Return the object called ``name`` below ``torch``; None if it does not exist."""
    try:
        return resolve_name(f"torch.{name}")
    except AttributeError:
        return None


def _name(schema: str) -> str:
    """Return the name and overload of an operator's schema."""
    return schema.partition("(")[0]


def _shapes() -> Iterator[tuple[str, str | None]]:
    """Yield differences of the shapes of log-sum-exps, computed on meta tensors."""
    q = torch.empty(1, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1]
    rows = tuple(q.shape[:3])
    right = tuple(lse.shape) in (rows, (*rows, 1))
    yield "lse of cuDNN", None if right else f"has shape {tuple(lse.shape)}"
    q = torch.empty(1, 16, 4, 64, dtype=torch.bfloat16, device="meta")
    calls = {
        "lse of flash attention": (q, None, 16, (1, 4, 16)),
        "lse of flash attention with cum_seq_q": (
            q[0],
            torch.empty(3, dtype=torch.int32, device="meta"),
            9,
            (4, 16),
        ),
    }
    for what, (x, starts, longest, shape) in calls.items():
        lse = torch.ops.aten._flash_attention_forward(
            x, x, x, starts, starts, longest, longest, 0.0, True, False
        )[1]
        yield what, None if tuple(lse.shape) == shape else f"has shape {tuple(lse.shape)}"


def _kernel_difference(operator: str) -> str | None:
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    there = torch._C._dispatch_has_kernel_for_dispatch_key
    return None if any(there(f"aten::{operator}", key) for key in keys) else "has no kernel"


def _nccl_difference() -> str | None:
    """Return why SPPO's options of an NCCL communicator cannot be made; None if they can."""
    try:
        options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = 4
        options._timeout = timedelta(seconds=1)
    except (AttributeError, TypeError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
