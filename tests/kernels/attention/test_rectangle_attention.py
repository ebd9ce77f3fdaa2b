"""Rectangles of a span, and the calls that flash-attn's packages get for them.

The packages need a GPU. Here functions with their published signatures stand in for them, doing the
definition of attention in torch: what is proven is which arguments they get and what is made of
their results.
"""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels.attention import rectangle_attention
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from sppo.kernels.attention.rectangle_attention import RectangleAttention, joined, rectangles
from tests.kernels.attention.reference import Definition, computed, spans, visible_pairs


@settings(deadline=None, max_examples=200)
@given(spans(60), st.none() | st.integers(1, 62))
def test_rectangles_cover_every_visible_pair_once(span, max_keys):
    c, t = span["num_queries"], span["num_keys"]
    span = {**span, "max_keys": max_keys}
    seen = torch.zeros(c, t, dtype=torch.int64)
    parts = list(rectangles(**span))
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


def rectangle(a):
    """(o, lse) of ``[1, tokens, heads, D]`` operands, or gradients if there is one of the output.

    Bottom-right aligned; ``left`` keys before a query's own, all for None or -1. The given o and
    lse may be those of more keys than these.
    """
    q, k, v, scale, left = (a[name] for name in ("q", "k", "v", "scale", "left"))
    group, window = q.shape[2] // k.shape[2], None if left in (None, -1) else left + 1
    assert a["causal"] or window is None
    k, v = (x[0].repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("cnd,tnd->nct", q[0], k) * scale
    if a["causal"]:
        mask = visible_pairs(q.shape[1], len(k), window=window, document_starts=(0,))
        scores = scores.masked_fill(~mask, float("-inf"))
    if "do" not in a:
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return torch.einsum("nct,tnd->cnd", weights, v).unsqueeze(0), lse.unsqueeze(0)
    do, o = a["do"][0], a["o"][0]
    weights = (scores - a["lse"][0].unsqueeze(-1)).exp()
    delta = (do * o).sum(-1).T.unsqueeze(-1)
    dscores = weights * (torch.einsum("cnd,tnd->nct", do, v) - delta) * scale
    dq = torch.einsum("nct,tnd->cnd", dscores, k)
    dk, dv = (
        torch.einsum("nct,cnd->tnd", of, rows).unflatten(1, (-1, group)).sum(2)
        for of, rows in ((dscores, q[0]), (weights, do))
    )
    return tuple(x.unsqueeze(0) for x in (dq, dk, dv))


def documents(a):
    """What a call with offsets computes: each document by itself, without a batch."""
    cu_q, cu_k = a["cu_q"], a["cu_k"]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert a["max_q"] == int((cu_q[1:] - cu_q[:-1]).max())
    assert a["max_k"] == int((cu_k[1:] - cu_k[:-1]).max())
    parts = []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        cut = {name: a[name][rows] for name in ("q", "do", "o") if name in a}
        cut |= {name: a[name][keys] for name in ("k", "v")}
        cut |= {"lse": a["lse"][:, rows]} if "lse" in a else {}
        parts.append(rectangle(a | {name: x.unsqueeze(0) for name, x in cut.items()}))
    of_parts = [[x[0] for x in result] for result in zip(*parts, strict=True)]
    return tuple(torch.cat(x, 1 if x[0].dim() == 2 else 0) for x in of_parts)


OURS = {
    "dout": "do", "out": "o", "softmax_lse": "lse", "softmax_scale": "scale", "is_causal": "causal",
    "window_size_left": "left", "cu_seqlens_q": "cu_q", "cu_seqlens_k": "cu_k",
    "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
}  # fmt: skip
NEUTRAL = {
    "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False, "debug": False,
    "deterministic": False, "return_lse": True,
}  # fmt: skip


def stand_in(parameters):
    """A function with these parameters that computes attention by its definition."""
    bind = eval(f"lambda {parameters}: locals()")

    def function(*arguments, **options):
        given = bind(*arguments, **options)
        assert all(given.get(name, value) == value for name, value in NEUTRAL.items())
        a = {OURS.get(name, name): value for name, value in given.items()}
        assert a["window_size_right"] == (0 if a["left"] not in (None, -1) else a["left"])
        a = {name: value for name, value in a.items() if value is not None} | {"left": a["left"]}
        results = documents(a) if "cu_q" in a else rectangle(a)
        for name, result in zip(("dq", "dk", "dv"), results, strict=False):
            if name in a:
                a[name].copy_(result)
        return *results, torch.empty(0)

    return function


FLASH_ATTN_2 = {
    "_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, return_softmax",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale,"
    " causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, "
    "rng_state=None",
    "_flash_attn_varlen_forward": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,"
    " dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None",
    "_flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, "
    "cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
}
FLASH_ATTN_3 = {
    "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None,"
    " cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, *, softmax_scale=None, causal=False, window_size_left=-1, "
    "window_size_right=-1",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None,"
    " sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, "
    "dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, "
    "softcap=0.0, deterministic=False, sm_margin=0",
}
FLASH_ATTN_4 = {
    "_flash_attn_fwd": "q, k, v, cu_seqlens_q=None, *, softmax_scale=None, causal=False, "
    "window_size_left=None, window_size_right=None, return_lse=False",
    "_flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
    "window_size_left=None, window_size_right=None, *, deterministic=False",
}
PACKAGES = {
    "flash_attn_2": {"flash_attn": {}, "flash_attn.flash_attn_interface": FLASH_ATTN_2},
    "flash_attn_3": {"flash_attn_interface": FLASH_ATTN_3},
    "flash_attn_4": {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": FLASH_ATTN_4,
    },
}
"""Published signatures of the functions, by module."""
CASES = {
    "plain": (40, 100, {}),
    "window": (40, 100, {"window": 13}),
    "documents": (40, 100, {"document_starts": (0, 30, 75, 76)}),
    "window in documents": (60, 100, {"window": 13, "document_starts": (0, 30, 75, 76)}),
}


@pytest.fixture
def installed(monkeypatch):
    """A function that installs a package of stand-ins."""

    def install(package):
        for name, functions in PACKAGES[package].items():
            module = ModuleType(name)
            module.__dict__.update({name: stand_in(text) for name, text in functions.items()})
            monkeypatch.setitem(sys.modules, name, module)

    return install


def problem(case):
    """(call, do)."""
    c, t, options = CASES[case]
    generator = torch.Generator().manual_seed(0)
    shapes = [(c, 6, 8), (c, 6, 8), (t, 2, 8), (t, 2, 8)]
    do, q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return AttentionCall(q, k, v, scale=0.3, **options), do


def assert_is_the_definition(kernel, case):
    ours, exact = (computed(one, *problem(case)) for one in (kernel, Definition()))
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_keys", [1, 16, 1000])
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_compose_to_the_definition(package, max_keys, case, installed):
    installed(package)
    assert_is_the_definition(replace(KERNELS[package], max_backward_keys=max_keys), case)


class Watched:
    """A rectangle kernel that notes the elements of the keys of every forward."""

    def __init__(self, kernel):
        self._kernel, self.calls = kernel, []
        self.takes_documents, self.backward = kernel.takes_documents, kernel.backward

    def forward(self, call):
        self.calls.append(call.k_tKD.numel())
        return self._kernel.forward(call)


@pytest.mark.parametrize("case", ["plain", "documents"])
@pytest.mark.parametrize("package", PACKAGES)
def test_no_forward_call_counts_too_many_elements(package, case, monkeypatch, installed):
    """Keys beyond the bound are read in parts and merged; up to the bound in one call."""
    installed(package)
    whole, parts = (Watched(KERNELS[package].kernel) for _ in range(2))
    assert_is_the_definition(RectangleAttention(whole), case)
    bound = 64 * 2 * 8
    monkeypatch.setattr(rectangle_attention, "MAX_FORWARD_ELEMENTS", bound)
    assert_is_the_definition(RectangleAttention(parts), case)
    assert max(parts.calls) <= bound
    assert len(parts.calls) == len(whole.calls) + 1


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
        return self._flash(**{n: x for n, x in locals().items() if n != "self"})

    def _flash_attention_backward(
        self, do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, rng_state,
        unused, *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        return self._flash(**{n: x for n, x in locals().items() if n != "self"})[:3]

    def _flash(self, q, k, cum_q, cum_k, max_q, max_k, **others):
        self.calls += 1
        if cum_q is None:
            assert (cum_k, max_q, max_k) == (None, q.shape[1], k.shape[1])
        parameters = ", ".join([*others, "q, k, cu_seqlens_q, cu_seqlens_k, max_q, max_k"])
        offsets = {"cu_seqlens_q": cum_q, "cu_seqlens_k": cum_k, "max_q": max_q, "max_k": max_k}
        return *stand_in(parameters)(**others, q=q, k=k, **offsets), None, None

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, debug, *, scale
    ):
        assert bias is None
        assert compute_log_sumexp
        options = {"causal": is_causal, "left": None, "scale": scale}
        results = [rectangle(options | by_token(q=q[b], k=k[b], v=v[b])) for b in range(q.shape[0])]
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
        options = {"causal": is_causal, "left": None, "scale": scale}
        lse = lse.view(q.shape[:3])
        results = [
            rectangle(
                options
                | by_token(do=do[b], q=q[b], k=k[b], v=v[b], o=o[b])
                | {"lse": lse[b : b + 1]}
            )
            for b in range(q.shape[0])
        ]
        return tuple(torch.cat(parts).transpose(1, 2) for parts in zip(*results, strict=True))


def by_token(**tensors):
    """``[heads, tokens, D]`` as ``[1, tokens, heads, D]``."""
    return {name: x.transpose(0, 1).unsqueeze(0) for name, x in tensors.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_keys", [16, 1000])
def test_torch_flash_composes_to_the_definition(max_keys, case, monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", Operators())
    assert_is_the_definition(replace(KERNELS["torch_flash"], max_backward_keys=max_keys), case)


@pytest.mark.parametrize("max_keys", [16, 1000])
def test_documents_of_a_span_take_one_call(max_keys, monkeypatch):
    operators = Operators()
    monkeypatch.setattr(torch.ops, "aten", operators)
    kernel = replace(KERNELS["torch_flash"], max_backward_keys=max_keys)
    q, k = torch.randn(40, 2, 8), torch.randn(100, 2, 8)
    call = AttentionCall(q, k, k, document_starts=(0, 75, 76, 90))
    o, lse = kernel.forward(call)
    assert operators.calls == 1
    kernel.backward(call, q, o, lse, dk_TKD=torch.zeros_like(k), dv_TKD=k.clone())
    before_the_span = 4 if max_keys == 16 else 0  # keys that the first document has there
    assert operators.calls == 2 + before_the_span


@pytest.mark.parametrize("case", ["plain", "documents"])
@pytest.mark.parametrize("lse_columns", [True, False])
def test_cudnn_composes_to_the_definition(lse_columns, case, monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", Operators(lse_columns=lse_columns))
    assert_is_the_definition(KERNELS["cudnn"], case)
