"""The installed torch takes the calls of the CUDA path; needs no GPU.

Operators are compared by schema: the installed operator must accept every call that the expected
schema accepts. Functions and classes are compared by the arguments that SPPO passes, other objects
by name. A build of torch without CUDA has no runtime, NCCL and CUDA kernels to compare.
"""

import inspect
import re
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import pytest
import torch
import torch.distributed

SOURCES = sorted((Path(__file__).parents[2] / "sppo").rglob("*.py"))
of_cuda_builds = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch is built without CUDA"
)

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
    "sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor",
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


class Call(NamedTuple):
    """Arguments with which SPPO calls a function or class."""

    positional: int = 0
    keywords: tuple[str, ...] = ()


CALLS = {
    "cuda.Event": Call(0, ("enable_timing", "blocking")),
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
"""Functions and classes below ``torch`` that may change, and the arguments that SPPO passes."""
CUDA_ATTRIBUTES = {
    "cuda.Stream": ("cuda_stream",),
    "_C._cudart": ("cudaHostRegister", "cudaHostUnregister", "cudaGetErrorString", "cudaError"),
    "_C._CudaDeviceProperties": ("total_memory", "pci_domain_id", "pci_bus_id", "pci_device_id"),
    "distributed.ProcessGroupNCCL": ("Options",),
}
"""Attributes that objects below ``torch`` must have in builds with CUDA."""


def operator_difference(expected):
    """Return why an operator cannot be called by the ``expected`` schema; None if it can."""
    name, _, overload = name_of(expected).partition(".")
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload or "default", None)
    if found is None:
        return "is not there"
    if found._schema.is_backward_compatible_with(torch._C.parse_schema(f"aten::{expected}")):
        return None
    return f"is now {found._schema}"


def call_difference(called, call):
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


def _reads_in_new(called):
    """Return whether a class reads its arguments in ``__new__``."""
    return inspect.isclass(called) and inspect.isfunction(vars(called).get("__new__"))


def below_torch(name):
    """Return the object called ``name`` below ``torch``; None if it does not exist."""
    try:
        return resolve_name(f"torch.{name}")
    except AttributeError:
        return None


def name_of(schema):
    """Return the name and overload of an operator's schema."""
    return schema.partition("(")[0]


@pytest.mark.parametrize("schema", [*CUDA_OPERATORS, *CPU_OPERATORS], ids=name_of)
def test_operators_take_every_call(schema):
    assert operator_difference(schema) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_functions_take_every_call(name):
    assert call_difference(below_torch(name), CALLS[name]) is None


@of_cuda_builds
@pytest.mark.parametrize("owner", CUDA_ATTRIBUTES)
def test_objects_of_cuda_have_every_attribute(owner):
    assert all(hasattr(below_torch(owner), name) for name in CUDA_ATTRIBUTES[owner])


@of_cuda_builds
@pytest.mark.parametrize("schema", CUDA_OPERATORS, ids=name_of)
def test_operators_have_kernels_for_cuda(schema):
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    there = torch._C._dispatch_has_kernel_for_dispatch_key
    assert any(there(f"aten::{name_of(schema)}", key) for key in keys)


@of_cuda_builds
def test_options_of_an_nccl_communicator():
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    options._timeout = timedelta(seconds=1)


def test_shapes_of_log_sum_exps():
    """Computed on meta tensors."""
    q = torch.empty(1, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1]
    assert tuple(lse.shape) in ((1, 4, 16), (1, 4, 16, 1))
    q = torch.empty(1, 16, 4, 64, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    flash = torch.ops.aten._flash_attention_forward
    lse = flash(q, q, q, None, None, 16, 16, 0.0, True, False)[1]
    assert tuple(lse.shape) == (1, 4, 16)
    lse = flash(q[0], q[0], q[0], starts, starts, 9, 9, 0.0, True, False)[1]
    assert tuple(lse.shape) == (4, 16)


def test_every_operator_of_the_sources_is_compared():
    schemas = (*CUDA_OPERATORS, *CPU_OPERATORS)
    operators = {name_of(schema).partition(".")[0] for schema in schemas}
    for path in SOURCES:
        called = set(re.findall(r"torch\.(?:ops\.aten\.|(?=_foreach_))(\w+)", path.read_text()))
        assert called <= operators, f"{path}: add {called - operators} to the operators"
