"""Rectangles of a span, and the calls that flash-attn's packages get for them.

The packages need a GPU. Here functions with their published signatures stand in for them, doing the
definition of attention in torch: what is proven is which arguments they get and what is made of
their results.
"""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels.attention import cudnn_blocks, flash_packages, rectangle_attention
from sppo.kernels.attention.document_offsets import document_offsets
from sppo.kernels.attention.kernel import BlockAttention, Reference
from sppo.kernels.attention.rectangle_attention import RectangleAttention, joined, rectangles
from sppo.kernels.attention.reference import visible_pairs


@st.composite
def spans(draw):
    t = draw(st.integers(1, 60))
    starts = draw(st.sets(st.integers(1, t - 1), max_size=4)) if t > 1 else set()
    return {
        "num_queries": draw(st.integers(1, t)),
        "num_keys": t,
        "window": draw(st.none() | st.integers(1, t + 2)),
        "document_starts": (0, *sorted(starts)),
        "max_keys": draw(st.none() | st.integers(1, t + 2)),
    }


@settings(deadline=None, max_examples=200)
@given(spans())
def test_rectangles_cover_every_visible_pair_once(span):
    c, t = span["num_queries"], span["num_keys"]
    seen = torch.zeros(c, t, dtype=torch.int64)
    parts = list(
        rectangles(
            c,
            t,
            window=span["window"],
            document_starts=span["document_starts"],
            max_keys=span["max_keys"],
        )
    )
    assert_joined(parts, span)
    for r in parts:
        rows, keys = r.q1 - r.q0, r.k1 - r.k0
        inside = torch.ones(rows, keys, dtype=torch.bool)
        if r.causal:
            assert rows <= keys
            inside = visible_pairs(rows, keys, window=span["window"], document_starts=(0,))
        elif span["max_keys"] is not None:
            assert keys <= span["max_keys"]
        seen[r.q0 : r.q1, r.k0 : r.k1] += inside
    expected = visible_pairs(c, t, window=span["window"], document_starts=span["document_starts"])
    assert torch.equal(seen, expected.long())


def assert_joined(parts, span):
    """All causal parts become one, which has their queries and keys and no others."""
    causal = [part for part in parts if part.causal]
    *others, last = joined(parts)
    assert others == [part for part in parts if not part.causal]
    assert [(last.q0, last.q1), (last.k0, last.k1)] == [
        (0, span["num_queries"]),
        (causal[0].k0, span["num_keys"]),
    ]
    assert list(last.documents) == (causal if len(causal) > 1 else [])
    for names in (("q0", "q1"), ("k0", "k1")):
        begins, ends = ([getattr(part, name) for part in causal] for name in names)
        assert begins[1:] == ends[:-1]
    if span["max_keys"] is not None and span["window"] is None:
        assert last.k1 - last.k0 <= max(span["max_keys"], span["num_queries"])


def mask_of(rows, keys, *, causal, left):
    """Bottom-right aligned; ``left`` keys before a query's own, all for None or -1."""
    if not causal:
        assert left in (None, -1)
        return torch.ones(rows, keys, dtype=torch.bool)
    window = None if left in (None, -1) else left + 1
    return visible_pairs(rows, keys, window=window, document_starts=(0,))


def by_definition(q, k, v, *, causal, left, scale):
    """(o, lse) of ``[1, tokens, heads, D]`` operands, with heads repeated."""
    group = q.shape[2] // k.shape[2]
    k, v = (x[0].repeat_interleave(group, 1) for x in (k, v))
    mask = mask_of(q.shape[1], k.shape[0], causal=causal, left=left)
    scores = torch.einsum("cnd,tnd->nct", q[0], k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    return torch.einsum("nct,tnd->cnd", weights, v).unsqueeze(0), lse.unsqueeze(0)


def gradients_by_definition(do, q, k, v, o, lse, *, causal, left, scale):
    """With the given o and lse, which may be those of more keys than these."""
    group = q.shape[2] // k.shape[2]
    repeated_k, repeated_v = (x[0].repeat_interleave(group, 1) for x in (k, v))
    mask = mask_of(q.shape[1], k.shape[1], causal=causal, left=left)
    scores = torch.einsum("cnd,tnd->nct", q[0], repeated_k) * scale
    weights = (scores - lse[0].unsqueeze(-1)).exp() * mask
    dweights = torch.einsum("cnd,tnd->nct", do[0], repeated_v)
    delta = (do[0] * o[0]).sum(-1).T.unsqueeze(-1)
    dscores = weights * (dweights - delta) * scale
    dq = torch.einsum("nct,tnd->cnd", dscores, repeated_k)
    dk = torch.einsum("nct,cnd->tnd", dscores, q[0])
    dv = torch.einsum("nct,cnd->tnd", weights, do[0])
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return tuple(x.unsqueeze(0) for x in (dq, dk, dv))


def one_by_one(compute, tensors, cu_q, cu_k, max_q, max_k, **options):
    """What a call with offsets computes, each document by itself: a list of parts per result."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q == int((cu_q[1:] - cu_q[:-1]).max())
    assert max_k == int((cu_k[1:] - cu_k[:-1]).max())
    results = []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        cut = {
            name: x[:, rows] if name == "lse" else x[keys] if name in ("k", "v") else x[rows]
            for name, x in tensors.items()
        }
        results.append(compute(*(x.unsqueeze(0) for x in cut.values()), **options))
    return [[x[0] for x in parts] for parts in zip(*results, strict=True)]


def forward_one_by_one(q, k, v, *offsets, **options):
    """(o, lse) without a batch."""
    o, lse = one_by_one(by_definition, {"q": q, "k": k, "v": v}, *offsets, **options)
    return torch.cat(o), torch.cat(lse, 1)


def backward_one_by_one(do, q, k, v, o, lse, *offsets, **options):
    """(dq, dk, dv) without a batch."""
    tensors = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    parts = one_by_one(gradients_by_definition, tensors, *offsets, **options)
    return [torch.cat(part) for part in parts]


def flash_attn_2():
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        assert window_size_right == (-1 if window_size_left == -1 else 0)
        o, lse = by_definition(q, k, v, causal=causal, left=window_size_left, scale=softmax_scale)
        return o, lse, torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, deterministic) == (0.0, 0.0, None, False)
        options = {"causal": causal, "left": window_size_left, "scale": softmax_scale}
        results = gradients_by_definition(dout, q, k, v, out, softmax_lse, **options)
        for place, value in zip((dq, dk, dv), results, strict=True):
            place.copy_(value)
        return torch.empty(0)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"causal": causal, "left": window_size_left, "scale": softmax_scale}
        return *forward_one_by_one(q, k, v, *offsets, **options), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, deterministic) == (0.0, 0.0, None, False)
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"causal": causal, "left": window_size_left, "scale": softmax_scale}
        results = backward_one_by_one(dout, q, k, v, out, softmax_lse, *offsets, **options)
        for place, value in zip((dq, dk, dv), results, strict=True):
            place.copy_(value)
        return torch.empty(0)

    return {
        "flash_attn": {},
        "flash_attn.flash_attn_interface": {
            "_flash_attn_forward": _flash_attn_forward,
            "_flash_attn_backward": _flash_attn_backward,
            "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
            "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
        },
    }


def flash_attn_3():
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, *, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1,
    ):  # fmt: skip
        options = {"causal": causal, "left": window_size_left, "scale": softmax_scale}
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if cu_seqlens_q is None:
            assert offsets == (None,) * 4
            o, lse = by_definition(q, k, v, **options)
        else:
            o, lse = forward_one_by_one(q, k, v, *offsets, **options)
        return o, lse, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        options = {"causal": is_causal, "left": window_size_left, "scale": softmax_scale}
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        operands = (dout, q, k, v, out, softmax_lse)
        if cu_seqlens_q is None:
            assert offsets == (None,) * 4
            results = gradients_by_definition(*operands, **options)
        else:
            results = backward_one_by_one(*operands, *offsets, **options)
        for place, value in zip((dq, dk, dv), results, strict=True):
            place.copy_(value)
        return torch.empty(0)

    functions = {
        "_flash_attn_forward": _flash_attn_forward,
        "_flash_attn_backward": _flash_attn_backward,
    }
    return {"flash_attn_interface": functions}


def flash_attn_4():
    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, *, softmax_scale=None, causal=False, window_size_left=None,
        window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        return by_definition(q, k, v, causal=causal, left=window_size_left, scale=softmax_scale)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
        window_size_left=None, window_size_right=None, *, deterministic=False,
    ):  # fmt: skip
        options = {"causal": causal, "left": window_size_left, "scale": softmax_scale}
        return gradients_by_definition(dout, q, k, v, out, lse, **options)

    functions = {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}
    return {"flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.interface": functions}


PACKAGES = {
    "flash_attn_2": (flash_packages.FlashAttn2, flash_attn_2),
    "flash_attn_3": (flash_packages.FlashAttn3, flash_attn_3),
    "flash_attn_4": (flash_packages.FlashAttn4, flash_attn_4),
}
CASES = {
    "plain": (40, 100, {}),
    "window": (40, 100, {"window": 13}),
    "documents": (40, 100, {"document_starts": (0, 30, 75, 76)}),
    "window in documents": (60, 100, {"window": 13, "document_starts": (0, 30, 75, 76)}),
}


def assert_is_the_definition(kernel, case):
    c, t, given_options = CASES[case]
    options = {"window": None, "document_starts": (0,), "scale": 0.3, **given_options}
    generator = torch.Generator().manual_seed(0)
    shapes = [(c, 6, 8), (c, 6, 8), (t, 2, 8), (t, 2, 8)]
    do, q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    results = []
    for one in (kernel, Reference()):
        o, lse = one.forward(q, k, v, **options)
        dk, dv = torch.ones_like(k), torch.ones_like(v)
        dq = one.backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv, **options)
        results.append((o, lse, dq, dk, dv))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_keys", [1, 16, 1000])
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_compose_to_the_definition(package, max_keys, case, monkeypatch):
    adapter, stand_in = PACKAGES[package]
    for name, functions in stand_in().items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    assert_is_the_definition(RectangleAttention(adapter(), max_backward_keys=max_keys), case)


@pytest.mark.parametrize("case", ["plain", "documents"])
@pytest.mark.parametrize("package", PACKAGES)
def test_no_forward_call_counts_too_many_elements(package, case, monkeypatch):
    """Keys beyond the bound are read in parts and merged; up to the bound in one call."""
    adapter, stand_in = PACKAGES[package]
    for name, functions in stand_in().items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    calls = []

    class Watched(adapter):
        def forward(self, q, k, v, **options):
            calls.append(k.numel())
            return super().forward(q, k, v, **options)

    kernel = RectangleAttention(Watched())
    assert_is_the_definition(kernel, case)
    whole, bound = len(calls), 64 * 2 * 8
    monkeypatch.setattr(rectangle_attention, "MAX_FORWARD_ELEMENTS", bound)
    calls.clear()
    assert_is_the_definition(kernel, case)
    assert max(calls) <= bound
    assert len(calls) == whole + 1


class Operators:
    """``torch.ops.aten`` with the flash and cuDNN operators done by the definition.

    ``lse_columns``: whether cuDNN's lse has a last dimension of one.
    """

    def __init__(self, *, lse_columns=True):
        self.lse_columns = lse_columns
        self.calls = 0

    def _flash_attention_forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, debug, *,
        scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (dropout_p, debug) == (0.0, False)
        options = {"causal": is_causal, "left": window_size_left, "scale": scale}
        self.calls += 1
        if cum_q is None:
            assert (cum_k, max_q, max_k) == (None, q.shape[1], k.shape[1])
            o, lse = by_definition(q, k, v, **options)
        else:
            o, lse = forward_one_by_one(q, k, v, cum_q, cum_k, max_q, max_k, **options)
        return o, lse, torch.empty(2), torch.empty(()), torch.empty(0)

    def _flash_attention_backward(
        self, do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, rng_state,
        unused, *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert dropout_p == 0.0
        options = {"causal": is_causal, "left": window_size_left, "scale": scale}
        self.calls += 1
        if cum_q is None:
            assert (cum_k, max_q, max_k) == (None, q.shape[1], k.shape[1])
            return gradients_by_definition(do, q, k, v, o, lse, **options)
        offsets = (cum_q, cum_k, max_q, max_k)
        return backward_one_by_one(do, q, k, v, o, lse, *offsets, **options)

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, debug, *, scale
    ):
        assert bias is None
        assert compute_log_sumexp
        results = [
            by_definition(*by_token(q[b], k[b], v[b]), causal=is_causal, left=None, scale=scale)
            for b in range(q.shape[0])
        ]
        o = torch.cat([o for o, _ in results]).transpose(1, 2)
        lse = torch.cat([lse for _, lse in results])
        return o, lse.unsqueeze(-1) if self.lse_columns else lse, None, None, 0, 0, None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, do, q, k, v, o, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p,
        is_causal, *, scale,
    ):  # fmt: skip
        assert (bias, cum_q, cum_k, dropout_p) == (None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert all(0 not in x.stride() for x in (q, k, v))
        assert lse.shape == (*q.shape[:3], *[1] * self.lse_columns)
        lse = lse.view(q.shape[:3])
        results = [
            gradients_by_definition(
                *by_token(do[b], q[b], k[b], v[b], o[b]), lse[b : b + 1],
                causal=is_causal, left=None, scale=scale,
            )
            for b in range(q.shape[0])
        ]  # fmt: skip
        return tuple(torch.cat(parts).transpose(1, 2) for parts in zip(*results, strict=True))


def by_token(*tensors):
    """``[heads, tokens, D]`` as ``[1, tokens, heads, D]``."""
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_keys", [16, 1000])
def test_torch_flash_composes_to_the_definition(max_keys, case, monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", Operators())
    kernel = RectangleAttention(flash_packages.TorchFlash(), max_backward_keys=max_keys)
    assert_is_the_definition(kernel, case)


@pytest.mark.parametrize("max_keys", [16, 1000])
def test_documents_of_a_span_take_one_call(max_keys, monkeypatch):
    operators = Operators()
    monkeypatch.setattr(torch.ops, "aten", operators)
    kernel = RectangleAttention(flash_packages.TorchFlash(), max_backward_keys=max_keys)
    q, k = torch.randn(40, 2, 8), torch.randn(100, 2, 8)
    options = {"window": None, "document_starts": (0, 75, 76, 90), "scale": 1.0}
    o, lse = kernel.forward(q, k, k, **options)
    assert operators.calls == 1
    kernel.backward(q, q, k, k, o, lse, dk_TKD=torch.zeros_like(k), dv_TKD=k.clone(), **options)
    before_the_span = 4 if max_keys == 16 else 0  # keys that the first document has there
    assert operators.calls == 2 + before_the_span


def test_offsets_are_made_once_for_all_layers():
    made = [document_offsets([3, 1], [7, 1], torch.device("cpu")) for _ in range(2)]
    assert made[0] is made[1]
    assert made[0].queries.tolist() == [0, 3, 4]
    assert made[0].keys.tolist() == [0, 7, 8]
    assert (made[0].most_queries, made[0].most_keys) == (3, 7)


@pytest.mark.parametrize("case", ["plain", "documents"])
@pytest.mark.parametrize("lse_columns", [True, False])
def test_cudnn_composes_to_the_definition(lse_columns, case, monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", Operators(lse_columns=lse_columns))
    assert_is_the_definition(BlockAttention(cudnn_blocks.CudnnBlocks()), case)


@pytest.mark.parametrize(
    "name",
    [
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ],
)
def test_the_stand_ins_are_called_as_the_operators_are(name):
    """Every argument that we leave out has a default in this torch; the names that we use exist."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    ours = set(getattr(Operators, name).__code__.co_varnames) & {
        "scale",
        "window_size_left",
        "window_size_right",
    }
    assert ours <= {argument.name for argument in arguments if argument.kwarg_only}
    positional = [a for a in arguments if not a.kwarg_only]
    assert len(positional) == getattr(Operators, name).__code__.co_argcount - 1
