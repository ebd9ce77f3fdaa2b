"""Attention by its definition, with autograd for the gradient: the reference of all back ends.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st


@st.composite
def spans(draw, longest):
    """How many queries and keys, the window, and where documents begin."""
    keys = draw(st.integers(1, longest))
    starts = draw(st.sets(st.integers(1, keys - 1), max_size=6)) if keys > 1 else set()
    return {
        "num_queries": draw(st.integers(1, keys)),
        "num_keys": keys,
        "window": draw(st.none() | st.integers(1, keys + 3)),
        "document_starts": (0, *sorted(starts)),
    }


class Definition:
    """Back end that materialises the whole score matrix."""

    def forward(self, call):
        """(o_CND in q's dtype, lse_NC), computed in fp32 or better."""
        acc_dtype = torch.promote_types(call.q_CND.dtype, torch.float32)
        group = call.heads // call.kv_heads
        k_TND, v_TND = (
            x.to(acc_dtype).repeat_interleave(group, dim=1) for x in (call.k_TKD, call.v_TKD)
        )
        scores_NCT = torch.einsum("cnd,tnd->nct", call.q_CND.to(acc_dtype), k_TND) * call.factor
        visible = visible_pairs(
            call.num_queries,
            call.num_keys,
            window=call.window,
            document_starts=call.document_starts,
        )
        scores_NCT = scores_NCT.masked_fill(~visible, float("-inf"))
        lse_NC = scores_NCT.logsumexp(-1)
        weights_NCT = (scores_NCT - lse_NC.unsqueeze(-1)).exp()
        return torch.einsum("nct,tnd->cnd", weights_NCT, v_TND).to(call.q_CND.dtype), lse_NC

    def backward(self, call, do_CND, o_CND, lse_NC, *, dk_TKD, dv_TKD):
        """dq_CND; adds to ``dk_TKD`` and ``dv_TKD``."""
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (call.q_CND, call.k_TKD, call.v_TKD))
            o, _ = self.forward(replace(call, q_CND=q, k_TKD=k, v_TKD=v))
            dq, dk, dv = torch.autograd.grad(o, (q, k, v), do_CND)
        dk_TKD.add_(dk)
        dv_TKD.add_(dv)
        return dq


def visible_pairs(num_queries, num_keys, *, window, document_starts):
    """A boolean ``[C, T]``: whether each of the last C positions sees each key."""
    key = torch.arange(num_keys)
    query = key[num_keys - num_queries :].unsqueeze(1)
    starts = torch.tensor(sorted({0, *document_starts}))
    document = torch.searchsorted(starts, key, right=True)
    visible = (key <= query) & (document == document[num_keys - num_queries :].unsqueeze(1))
    return visible if window is None else visible & (key > query - window)


def exactly(call):
    """The same call in float64 on the CPU."""
    q, k, v = (x.cpu().double() for x in (call.q_CND, call.k_TKD, call.v_TKD))
    return replace(call, q_CND=q, k_TKD=k, v_TKD=v)


def computed(kernel, call, do_CND):
    """Outputs and gradients of a back end, by name."""
    o, lse = kernel.forward(call)
    acc_dtype = torch.promote_types(do_CND.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=acc_dtype) for x in (call.k_TKD, call.v_TKD))
    dq = kernel.backward(call, do_CND, o, lse, dk_TKD=dk, dv_TKD=dv)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
