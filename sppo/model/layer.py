"""One transformer layer, written out forward and backward over the tokens of a subsequence.

The layer does not use autograd: every tensor that backward may need has a name, so that a plan can
retain, offload or recompute it and its bytes are counted exactly. Attention is an argument, so the
layer does not depend on K/V storage, other subsequences or other ranks.

        saved   meaning                              recomputed from
    x_in    layer input                          nothing: always saved
    q       rotated queries (with q/k-norm: the projection before its norm)    x_in
    k       keys before their norm, q/k-norm only                              x_in
    o, lse  attention output and log-sum-exp     q, by attention
    x_mid   residual stream after attention      x_in, o
    gate    gate projection (gated MLPs only)    x_mid
    up      up projection                        x_mid

Legend: C tokens, E hidden, N query heads, K key/value heads, D head size, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels import elementwise
from sppo.kernels.rotary import RotaryTable, rotate, rotate_backward
from sppo.model.gradients import GradientSink
from sppo.model.norms import add_norm_, norm, norm_backward
from sppo.model.projection import Projection

Weights = Mapping[str, Tensor]
Saved = dict[str, Tensor]


class SubsequenceAttention(Protocol):
    """Attention of one subsequence in one layer over its prefix and itself."""

    def forward(self, q_CND: Tensor, k_CKD: Tensor, v_CKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v at the subsequence's positions; return the attention (o_CND, lse_NC)."""
        ...

    @property
    def lacks_keys(self) -> bool:
        """True if backward must :meth:`provide` k and v before attention is computed."""
        ...

    def provide(self, k_CKD: Tensor, v_CKD: Tensor) -> None:
        """Store k and v at the subsequence's positions again, without attention."""
        ...

    def recompute(self, q_CND: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute (o_CND, lse_NC) of queries at the end, with K and V stored by :meth:`forward`.

        ``q_CND`` has the queries of all tokens, or of the last tokens, whose output was not saved.
        """
        ...

    def backward(
        self, do_CND: Tensor, q_CND: Tensor, o_CND: Tensor, lse_NC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_CND, dk_CKD, dv_CKD), all three in memory that the caller owns.

        dk and dv include the gradients from later subsequences.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Exchange of the residual stream's tokens before and after projections.

    By default it exchanges nothing: the rank has all tokens, and whole weights. With sharded
    weights (Megatron), both are collectives of the ranks over which tokens are sharded.
    """

    gather: Callable[[Tensor], Tensor] = lambda x_cE: x_cE
    """Function that returns ``[C, E]``: the tokens of all ranks."""
    scatter_sum: Callable[[Tensor], Tensor] = lambda x_CE: x_CE
    """Function that returns ``[c, E]``: this rank's tokens of the sum over all ranks."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Arithmetic of one layer for the tokens of one subsequence.

    With sharded weights (:mod:`sppo.parallel.megatron`), ``x_in`` and ``x_mid`` have c of the
    C tokens, and all other tensors have all C.

    Attributes:
        model: Shape of the model; the number of heads and the MLP width follow the weights.
        weights: Weights of the layer, by name within it.
        rotary: Angles of the tokens; None without rotary positions.
        attention: Attention of the tokens over their prefix and themselves.
        tokens: Collectives of the ranks over which the residual stream's tokens are sharded.
        adapter_scale: Factor of the product of the factors of an adapter.
    """

    model: ModelConfig
    weights: Weights
    rotary: RotaryTable | None
    attention: SubsequenceAttention
    tokens: TokenExchange = TokenExchange()  # noqa: RUF009 - has no state
    adapter_scale: float = 1.0

    def forward(self, x_CE: Tensor, *, keep: frozenset[str]) -> tuple[Tensor, Saved]:
        """Return the output ``[C, E]`` and the saved tensors named in ``keep``."""
        saved: Saved = {}

        def save(**tensors: Tensor) -> None:
            """Save the tensors named in ``keep``; the others are freed after their last use."""
            saved.update({name: tensor for name, tensor in tensors.items() if name in keep})

        save(x_in=x_CE)
        q, k, v = self._attention_inputs(x_CE, save)
        o_CND, lse = self.attention.forward(q, k, v)
        del q, k, v
        save(o=o_CND.flatten(1), lse=lse)
        x_mid = self._attention_output(o_CND.flatten(1))
        del o_CND, lse
        n2 = self.tokens.gather(add_norm_(self.model, "mlp_norm", x_mid, x_CE, self.weights))
        save(x_mid=x_mid)
        gate, up = self._mlp_inputs(n2)
        del n2
        save(up=up, **({} if gate is None else {"gate": gate}))
        return self._after_mlp(x_mid, gate, up), saved

    def backward(self, dy_CE: Tensor, *, saved: Saved, gradients: GradientSink) -> Tensor:
        """Return the gradient of the layer input ``[C, E]``; consumes ``saved``.

        Tensors missing from ``saved`` are recomputed. Saved tensors are overwritten and become
        operands of weight gradients: if ``gradients`` stores its operands, the tensors in ``saved``
        must own their memory.
        """
        x_in = saved.pop("x_in")
        n1 = self._gathered_norm("attention_norm", x_in)
        q_projected, q = self._queries(n1, saved)
        if "o" in saved:
            o, lse = saved.pop("o"), saved.pop("lse")
        else:
            self._provide_lacking(n1)
            o_CND, lse = self.attention.recompute(q)
            o = o_CND.flatten(1)
        x_mid = saved.pop("x_mid", None)
        if x_mid is None:
            x_mid = self._after_attention(x_in, o)
        dx_mid = self._mlp_backward(dy_CE, x_mid, saved, gradients)
        del x_mid
        back = self._projection("o").backward(self.tokens.gather(dx_mid))
        back.parameter_gradients(o, gradients)
        do_CND = back.input_gradient().view_as(q)
        del back
        self._provide_lacking(n1)
        dq, dk, dv = self.attention.backward(do_CND, q, o.view_as(do_CND), lse)
        del o, do_CND
        dq = self._unrotate_and_unnorm("q", dq, q_projected, gradients)
        k_projected = self._projected_keys(n1, saved)
        dk = self._unrotate_and_unnorm("k", dk, k_projected, gradients)
        dn1 = self._projection_backward(dq, dk, dv, n1, gradients)
        dn1 = self.tokens.scatter_sum(dn1)
        return norm_backward(
            self.model, "attention_norm", dn1, x_in, self.weights, gradients, dresidual_CE=dx_mid
        )

    def recompute_missing_rows(self, saved: Saved) -> None:
        """Recompute the last rows of each tensor of which only the first rows were saved.

        Tensors that were not saved at all are left to :meth:`backward`, except o and lse if a
        partly saved x_mid needs o. Each product has fewer rows than in forward, which some kernels
        round differently. With sharded weights no tensor is saved in part, and nothing is done.
        """
        x_in = saved["x_in"]
        tokens = x_in.shape[0]
        cut = {name: rows for name, t in saved.items() if (rows := rows_of(name, t)) < tokens}
        for name in cut.keys() & {"q", "k"}:
            n1 = norm(self.model, "attention_norm", x_in[cut[name] :], self.weights)
            rest = self._heads(name, n1)
            if not self.model.qk_norm:
                rest = self._norm_and_rotate(name, rest, _later(self.rotary, cut[name]))
            saved[name] = torch.cat([saved[name], rest])
        if "o" in cut or ("x_mid" in cut and "o" not in saved):
            self._attend_rest(saved)
        if "x_mid" in cut:
            rows = cut["x_mid"]
            rest = self._after_attention(x_in[rows:], saved["o"][rows:])
            saved["x_mid"] = torch.cat([saved["x_mid"], rest])
        if "up" in cut:
            rest = saved["x_mid"][cut["up"] :]
            gate, up = self._mlp_inputs(self._gathered_norm("mlp_norm", rest))
            saved["up"] = torch.cat([saved["up"], up])
            if gate is not None:
                saved["gate"] = torch.cat([saved["gate"], gate])

    def _attend_rest(self, saved: Saved) -> None:
        """Append the missing rows of o and lse to ``saved``, or all rows if none were saved."""
        done = saved["o"].shape[0] if "o" in saved else 0
        q = saved.get("q")
        if q is None:
            n1 = norm(self.model, "attention_norm", saved["x_in"][done:], self.weights)
            q = self._heads("q", n1)
        else:
            q = q[done:]
        if self.model.qk_norm or "q" not in saved:
            q = self._norm_and_rotate("q", q, _later(self.rotary, done))
        if self.attention.lacks_keys:
            self.recompute_kv(saved["x_in"])
        o_CND, lse_NC = self.attention.recompute(q)
        if done:
            saved["o"] = torch.cat([saved["o"], o_CND.flatten(1)])
            saved["lse"] = torch.cat([saved["lse"], lse_NC], dim=1)
        else:
            saved["o"], saved["lse"] = o_CND.flatten(1), lse_NC

    def recompute_kv(self, x_CE: Tensor) -> None:
        """Provide k and v to attention again, bitwise equal to those of :meth:`forward`."""
        self._provide(self._gathered_norm("attention_norm", x_CE))

    def _provide_lacking(self, n1_CE: Tensor) -> None:
        """Provide k and v to attention in backward if it lacks them."""
        if self.attention.lacks_keys:
            self._provide(n1_CE)

    def _provide(self, n1_CE: Tensor) -> None:
        k, v = (self._heads(name, n1_CE) for name in ("k", "v"))
        self.attention.provide(self._norm_and_rotate("k", k, self.rotary), v)

    def recompute_output(self, saved: Saved) -> Tensor:
        """Return the output ``[C, E]`` from the saved x_in and o, without recomputing attention.

        Adds x_mid, gate and up to ``saved``, so that :meth:`backward` need not recompute them.
        """
        if "x_mid" not in saved:
            saved["x_mid"] = self._after_attention(saved["x_in"], saved["o"])
        if "up" not in saved:
            gate, saved["up"] = self._mlp_inputs(self._gathered_norm("mlp_norm", saved["x_mid"]))
            if gate is not None:
                saved["gate"] = gate
        return self._after_mlp(saved["x_mid"], saved.get("gate"), saved["up"])

    def _attention_inputs(
        self, x_CE: Tensor, save: Callable[..., None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q_CND, k_CKD, v_CKD) after norms and rotation; save q, and k before its norm."""
        n1 = self._gathered_norm("attention_norm", x_CE)
        q, k, v = (self._heads(name, n1) for name in ("q", "k", "v"))
        del n1
        if self.model.qk_norm:
            save(q=q, k=k)
        q = self._norm_and_rotate("q", q, self.rotary)
        k = self._norm_and_rotate("k", k, self.rotary)
        if not self.model.qk_norm:
            save(q=q)
        return q, k, v

    def _queries(self, n1_CE: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor]:
        """Return (projected, rotated) queries ``[C, N, D]``; projected is None without q/k-norm."""
        q = saved.pop("q", None)
        if q is not None and not self.model.qk_norm:
            return None, q
        if q is None:
            q = self._heads("q", n1_CE)
        rotated = self._norm_and_rotate("q", q, self.rotary)
        return (q if self.model.qk_norm else None), rotated

    def _projected_keys(self, n1_CE: Tensor, saved: Saved) -> Tensor | None:
        """Return the keys before their norm, or None without q/k-norm."""
        if not self.model.qk_norm:
            return None
        k = saved.pop("k", None)
        return self._heads("k", n1_CE) if k is None else k

    def _heads(self, name: str, n1_CE: Tensor) -> Tensor:
        projected = self._project(name, n1_CE)
        return projected.view(projected.shape[0], -1, self.model.head_dim)

    def _projection(self, name: str) -> Projection:
        return Projection(name, self.weights, self.adapter_scale)

    def _project(self, name: str, x_CI: Tensor) -> Tensor:
        """Return a projection of ``x_CI``, ``[C, O]``."""
        return self._projection(name).forward(x_CI)

    def _norm_and_rotate(self, name: str, x_CHD: Tensor, rotary: RotaryTable | None) -> Tensor:
        if self.model.qk_norm:
            x_CHD = norm(self.model, f"{name}_norm", x_CHD, self.weights)
        return x_CHD if rotary is None else rotate(x_CHD, rotary)

    def _attention_output(self, o_CQ: Tensor) -> Tensor:
        """Return ``[C, E]``, the term that attention adds to the residual stream."""
        return self.tokens.scatter_sum(self._project("o", o_CQ))

    def _after_attention(self, x_CE: Tensor, o_CQ: Tensor) -> Tensor:
        """Return ``x_mid`` without its norm, bitwise equal to that of :meth:`forward`."""
        return self._attention_output(o_CQ).add_(x_CE)

    def _mlp_inputs(self, n2_CE: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return (gate_CF, up_CF); gate_CF is None for an MLP without a gate."""
        up = self._project("up", n2_CE)
        if not self.model.gated:
            return None, up
        return self._project("gate", n2_CE), up

    def _after_mlp(self, x_mid_CE: Tensor, gate_CF: Tensor | None, up_CF: Tensor) -> Tensor:
        hidden = elementwise.activation(gate_CF, up_CF, kind=self.model.mlp)
        out = self._project("down", hidden)
        return self.tokens.scatter_sum(out).add_(x_mid_CE)

    def _mlp_backward(
        self, dy_CE: Tensor, x_mid_CE: Tensor, saved: Saved, gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of ``x_mid`` through the MLP and the residual connection."""
        n2 = self._gathered_norm("mlp_norm", x_mid_CE)
        up, gate = saved.pop("up", None), saved.pop("gate", None)
        if up is None:
            up = self._project("up", n2)
        if gate is None and self.model.gated:
            gate = self._project("gate", n2)
        dy = self.tokens.gather(dy_CE)
        back = self._projection("down").backward(dy)
        del dy
        dhidden = back.input_gradient()
        inner = elementwise.activation_backward_(dhidden, gate, up, kind=self.model.mlp)
        del dhidden, gate, up
        back.parameter_gradients(inner.hidden_CF, gradients)
        back = self._projection("up").backward(inner.dup_CF)
        back.parameter_gradients(n2, gradients)
        dn2 = back.input_gradient()
        if inner.dgate_CF is not None:
            back = self._projection("gate").backward(inner.dgate_CF)
            back.parameter_gradients(n2, gradients)
            back.input_gradient(add_to_CI=dn2)
        del back, inner
        dn2 = self.tokens.scatter_sum(dn2)
        return norm_backward(
            self.model, "mlp_norm", dn2, x_mid_CE, self.weights, gradients, dresidual_CE=dy_CE
        )

    def _projection_backward(
        self,
        dq_CND: Tensor,
        dk_CKD: Tensor,
        dv_CKD: Tensor,
        n1_CE: Tensor,
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of the normed layer input through the q, k and v projections."""
        q, k, v = (
            self._projection(name).backward(d_CHD.flatten(1))
            for name, d_CHD in (("q", dq_CND), ("k", dk_CKD), ("v", dv_CKD))
        )
        dn1 = q.input_gradient()
        for back in (k, v):
            back.input_gradient(add_to_CI=dn1)
        for back in (q, k, v):
            back.parameter_gradients(n1_CE, gradients)
        return dn1

    def _unrotate_and_unnorm(
        self,
        name: str,
        d_CHD: Tensor,
        projected_CHD: Tensor | None,
        gradients: GradientSink,
    ) -> Tensor:
        if self.rotary is not None:
            d_CHD = rotate_backward(d_CHD, self.rotary)
        if not self.model.qk_norm:
            return d_CHD
        assert projected_CHD is not None, "q/k-norm needs its input"
        return norm_backward(
            self.model, f"{name}_norm", d_CHD, projected_CHD, self.weights, gradients
        )

    def _gathered_norm(self, name: str, x_CE: Tensor) -> Tensor:
        """Return the norm of all tokens, ``[C, E]``, gathered for the projections."""
        return self.tokens.gather(norm(self.model, name, x_CE, self.weights))


def token_dimension(name: str) -> int:
    """Return the dimension of the saved tensor ``name`` along which its tokens lie."""
    return 1 if name == "lse" else 0


def rows_of(name: str, tensor: Tensor) -> int:
    """Return the number of tokens in the saved tensor ``name``."""
    return tensor.shape[token_dimension(name)]


def _later(rotary: RotaryTable | None, row: int) -> RotaryTable | None:
    """Return the rotary table of the tokens from ``row`` on."""
    return None if rotary is None else RotaryTable(rotary.cos[row:], rotary.sin[row:])
