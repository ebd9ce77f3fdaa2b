"""What every back end of attention has to get right, on every device it runs on.

Against the definition in float64, in relative Frobenius norm. In bf16 and fp16 the unit roundoff u
(2^-8 and 2^-11) is what one rounding may cost; outputs are allowed 2 u and gradients 3 u. In fp32
the sums' own roundoff counts: 2e-6 for the 130 terms here, and 1e-13 in float64.

Operands and totals lie between NaNs, and fresh memory is full of them.
"""

from dataclasses import dataclass

import pytest
import torch

from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from sppo.kernels.attention.interface import may_have_single_tokens
from tests.kernels.attention.reference import Definition, computed, exactly
from tests.kernels.places import ATTENTION_PLACES, need_backend

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LSE_TOLERANCE = {
    torch.bfloat16: 1e-5,  # kept in fp32; torch's CPU kernel has a quick exponential here
    torch.float16: 1e-5,
    torch.float32: 2e-6,
    torch.float64: 1e-13,
}
OUTPUT_TOLERANCE = {
    torch.bfloat16: 2 * 2.0**-8,
    torch.float16: 2 * 2.0**-11,
    torch.float32: 2e-6,
    torch.float64: 1e-13,
}
GRADIENT_TOLERANCE = {**OUTPUT_TOLERANCE, torch.bfloat16: 3 * 2.0**-8, torch.float16: 3 * 2.0**-11}
TOLERANCES = {"o": OUTPUT_TOLERANCE, "lse": LSE_TOLERANCE}
EXACT_BACKENDS = ("cpu_flash", "torch_blocks")
GUARD = 5
pytestmark = pytest.mark.usefixtures("_fresh_memory_is_poisoned")


@dataclass(frozen=True)
class Shape:
    """C queries at the end of T keys, N and K heads of D."""

    c: int
    t: int
    n: int
    k: int
    d: int


@pytest.fixture(params=ATTENTION_PLACES)
def place(request):
    return request.param


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles in every direction, of sizes that do not divide each other's."""
    from sppo.kernels.attention import blocks as attention_blocks
    from sppo.kernels.attention import rectangle_attention

    monkeypatch.setattr(rectangle_attention, "MAX_BACKWARD_KEYS", 64)
    attention_blocks.attention_blocks.cache_clear()
    may_have_single_tokens.cache_clear()
    monkeypatch.setattr(attention_blocks, "MAX_FULL_KEYS", 50)
    monkeypatch.setattr(attention_blocks, "MAX_CAUSAL_TOKENS", 30)
    yield
    attention_blocks.attention_blocks.cache_clear()
    may_have_single_tokens.cache_clear()


def inside_nans(x, *, before=0):
    """``x`` as a view between rows and columns of NaN, which no kernel may read or write."""
    shape = (before + x.shape[0] + GUARD, x.shape[1] + 1, x.shape[2] + 16)
    around = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    view = around[before : before + x.shape[0], : x.shape[1], : x.shape[2]]
    view.copy_(x)
    return around, view


def operands(shape, *, dtype, device, seed=0):
    """(do, q, k, v), each inside NaNs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(shape.c, shape.n, shape.d)] * 2 + [(shape.t, shape.k, shape.d)] * 2
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [inside_nans(x.to(device, dtype))[1] for x in values]


def attend(backend, call, do):
    """Everything by name; dk and dv as what was added."""
    o, lse = KERNELS[backend].forward(call)
    q, acc_dtype = call.q_CND, torch.promote_types(do.dtype, torch.float32)
    totals = [torch.randn(x.shape, dtype=acc_dtype).to(x.device) for x in (call.k_TKD, call.v_TKD)]
    (dk_around, dk), (dv_around, dv) = (inside_nans(x) for x in totals)
    outside = torch.isnan(dk_around)
    dq = KERNELS[backend].backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv)
    assert torch.equal(torch.isnan(dk_around), outside)
    assert torch.equal(torch.isnan(dv_around), outside)
    assert (o.dtype, dq.dtype, lse.dtype) == (q.dtype, q.dtype, acc_dtype)
    assert (o.shape, dq.shape, lse.shape) == (q.shape, q.shape, (q.shape[1], q.shape[0]))
    return {"o": o, "lse": lse, "dq": dq, "dk": dk - totals[0], "dv": dv - totals[1]}


def assert_right(place, shape, *, dtype=torch.float32, seed=0, **options):
    backend, device = place
    documents = options.get("document_starts", (0,))
    need_backend(
        backend,
        device,
        dtype=dtype,
        head_size=shape.d,
        group=shape.n // shape.k,
        window=options.get("window") is not None,
        single_tokens=may_have_single_tokens(shape.c, shape.t, documents),
    )
    do, *operands_ = operands(shape, dtype=dtype, device=device, seed=seed)
    call = AttentionCall(*operands_, **options)
    ours = attend(backend, call, do)
    for name, value in computed(Definition(), exactly(call), do.cpu().double()).items():
        # The gradient of a query that sees one key is nothing but what cancelling left over.
        size = max(float(value.norm()), 0.2 * float(value.numel()) ** 0.5)
        error = float((ours[name].double().cpu() - value).norm()) / size
        bound = TOLERANCES.get(name, GRADIENT_TOLERANCE)[dtype]
        assert error <= bound, f"{name}: {error:.2e} above {bound:.2e}"


def some_dtype(place):
    """The more exact the better, but the packages have half precision only."""
    backend, device = place
    return torch.float32 if backend in EXACT_BACKENDS and device == "cpu" else torch.bfloat16


CASES = {
    "whole sequence": (Shape(77, 77, 2, 2, 64), {}),
    "span at the end": (Shape(45, 131, 2, 1, 64), {}),
    "long prefix": (Shape(3, 130, 4, 2, 64), {"scale": 0.3}),
    "one query": (Shape(1, 67, 2, 2, 64), {}),
    "small heads": (Shape(37, 83, 2, 1, 24), {}),
    "large heads": (Shape(37, 83, 2, 1, 256), {}),
    "groups of five": (Shape(19, 71, 10, 2, 64), {}),
    "groups of eight": (Shape(19, 71, 16, 2, 64), {}),
    "one token": (Shape(1, 1, 2, 1, 64), {}),
    "tiles that fit": (Shape(64, 128, 2, 2, 64), {}),
    "window": (Shape(45, 131, 2, 1, 64), {"window": 20}),
    "window of one": (Shape(33, 70, 2, 2, 64), {"window": 1}),
    "window beyond the sequence": (Shape(33, 70, 2, 2, 64), {"window": 71}),
    "documents": (Shape(61, 131, 2, 1, 64), {"document_starts": (0, 20, 75, 76, 110)}),
    "a document begins with the span": (Shape(40, 90, 2, 1, 64), {"document_starts": (0, 50)}),
    "window in documents": (
        Shape(61, 131, 4, 2, 64),
        {"window": 17, "document_starts": (0, 20, 75, 76, 110)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case(place, case):
    shape, options = CASES[case]
    assert_right(place, shape, dtype=some_dtype(place), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(place, dtype):
    shape = Shape(45, 101, 4, 2, 64)
    assert_right(place, shape, dtype=dtype)
    if place[0] != "cudnn":
        assert_right(place, shape, dtype=dtype, window=30, document_starts=(0, 60))


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(place, seed):
    random = torch.Generator().manual_seed(seed)

    def below(high):
        return int(torch.randint(high, (), generator=random))

    t = 1 + below(130)
    kv_heads = 1 + below(2)
    shape = Shape(1 + below(t), t, kv_heads * (1 + below(4)), kv_heads, (64, 96, 128)[below(3)])
    documents = (0, *sorted({below(t) for _ in range(below(5))} - {0}))
    window = None if place[0] == "cudnn" or below(2) else 1 + below(t + 2)
    options = {"window": window} | ({"document_starts": documents} if documents[1:] else {})
    assert_right(place, shape, dtype=some_dtype(place), seed=seed, **options)


def test_large_scores_do_not_overflow(place):
    backend, device = place
    dtype = some_dtype(place)
    need_backend(backend, device, dtype=dtype, head_size=64)
    _, q, k, v = operands(Shape(20, 60, 1, 1, 64), dtype=dtype, device=device)
    call = AttentionCall(q * 200, k, v)
    o, lse = KERNELS[backend].forward(call)
    assert bool(torch.isfinite(o).all())
    _, exact = Definition().forward(exactly(call))
    torch.testing.assert_close(lse.double().cpu(), exact, rtol=2**-7, atol=1e-3)


def test_a_span_in_pieces_is_the_whole(place):
    """Spans forward in order and backward in reverse, one pair of totals for all."""
    backend, device = place
    dtype = some_dtype(place)
    need_backend(backend, device, dtype=dtype, head_size=64)
    do, q, k, v = operands(Shape(90, 90, 2, 1, 64), dtype=dtype, device=device)
    exact = computed(Definition(), exactly(AttentionCall(q, k, v)), do.cpu().double())
    cuts = (0, 33, 80, 90) if backend == "cudnn" else (0, 1, 33, 34, 80, 90)
    spans = list(zip(cuts, cuts[1:], strict=False))
    calls = [AttentionCall(q[a:b], k[:b], v[:b]) for a, b in spans]
    kept = [KERNELS[backend].forward(call) for call in calls]
    acc_dtype = torch.promote_types(dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=acc_dtype, device=device) for x in (k, v))
    for (a, b), call, outputs in reversed(list(zip(spans, calls, kept, strict=True))):
        totals = {"dk_TKD": dk[:b], "dv_TKD": dv[:b]}
        KERNELS[backend].backward(call, do[a:b], *outputs, **totals)
    for name, total in (("dk", dk), ("dv", dv)):
        error = float((total.double().cpu() - exact[name]).norm() / exact[name].norm())
        assert error <= GRADIENT_TOLERANCE[dtype], f"{name}: {error:.2e}"


def test_two_runs_give_the_same_bits(place):
    """Where nothing is summed by atomics: the packages do unless told not to."""
    backend, device = place
    if backend not in EXACT_BACKENDS:
        pytest.skip(f"{backend} sums dq in any order")
    do, q, k, v = operands(Shape(70, 130, 4, 2, 64), dtype=torch.bfloat16, device=device)
    first, second = (computed(KERNELS[backend], AttentionCall(q, k, v), do) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_makes_no_sense_is_refused():
    q = torch.zeros(3, 4, 8)
    with pytest.raises(ValueError, match="a span of 3 queries cannot end at key 2"):
        AttentionCall(q, q[:2], q[:2])
    with pytest.raises(ValueError, match="window 0 hides a query from itself"):
        AttentionCall(q, q, q, window=0)
    with pytest.raises(ValueError, match="heads must be a multiple of key/value heads"):
        AttentionCall(q, q[:, :3], q[:, :3])
    with pytest.raises(ValueError, match="shapes equal"):
        AttentionCall(q, q, q[:2])
