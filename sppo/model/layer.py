"""One transformer layer, written out forward and backward over the tokens of a subsequence.

The layer does not use autograd: every tensor that backward may need has a name, so that a plan can
retain, offload or recompute it and its bytes are counted exactly. Attention is an argument, so the
layer does not depend on K/V storage, other subsequences or other ranks.

        saved          meaning                              recomputed from
    x_in           layer input                          nothing: always saved
    q              rotated queries (with q/k-norm: the projection before its norm)    x_in
    k              keys before their norm, q/k-norm only                              x_in
    o, lse         attention output and log-sum-exp, with sinks if any    q, by attention
    x_mid          residual stream after attention      x_in, o
    attention_out  projection of o, in place of x_mid if it has a norm of its own      o
    gate           gate projection (gated MLPs only)    x_mid
    up             up projection                        x_mid
    mlp_out        output of the MLP, if it has a norm of its own                      gate, up

:mod:`sppo.model.residual` says where the norms are.

Legend: C tokens, E hidden, Q = N D query width, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels.rotary import RotaryTable
from sppo.kernels.sinks import apply_sinks_, sink_gradient
from sppo.model.experts import ExpertMlp
from sppo.model.gradients import GradientSink
from sppo.model.heads import Heads
from sppo.model.mlp import DenseMlp, Mlp
from sppo.model.projection import Projection
from sppo.model.residual import Residual, TokenExchange
from sppo.model.router import NO_TERMS, RoutingTerms

Weights = Mapping[str, Tensor]
Saved = dict[str, Tensor]

_SINKS = "sinks.weight"


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
class Layer:
    """Arithmetic of one layer for the tokens of one subsequence.

    With sharded weights (:mod:`sppo.parallel.megatron`), tensors of the residual stream and the
    terms that are added to it have c of the C tokens, and all other tensors have all C.

    Attributes:
        model: Shape of the model; the number of heads and the MLP width follow the weights.
        weights: Weights of the layer, by name within it.
        rotary: Angles of the tokens; None without rotation.
        attention: Attention of the tokens over their prefix and themselves.
        tokens: Collectives of the ranks over which the residual stream's tokens are sharded.
        adapter_scale: Factor of the product of the factors of an adapter.
        routing: Terms of the routing of the tokens to experts.
    """

    model: ModelConfig
    weights: Weights
    rotary: RotaryTable | None
    attention: SubsequenceAttention
    tokens: TokenExchange = TokenExchange()  # noqa: RUF009 - has no state
    adapter_scale: float = 1.0
    routing: RoutingTerms = NO_TERMS

    def forward(self, x_CE: Tensor, *, keep: frozenset[str]) -> tuple[Tensor, Saved]:
        """Return the output ``[C, E]`` and the saved tensors named in ``keep``."""
        saved: Saved = {}

        def save(**tensors: Tensor) -> None:
            """Save the tensors named in ``keep``; the others are freed after their last use."""
            saved.update({name: tensor for name, tensor in tensors.items() if name in keep})

        save(x_in=x_CE)
        q, k, v = self._attention_inputs(x_CE, save)
        o_CND, lse = self._with_sinks_(*self.attention.forward(q, k, v))
        del q, k, v
        save(o=o_CND.flatten(1), lse=lse)
        out = self._attention_output(o_CND.flatten(1))
        del o_CND, lse
        save(attention_out=out)
        x_mid, n2 = self._residual.middle(x_CE, out)
        del out
        save(x_mid=x_mid)
        inputs = self._mlp.inputs(n2)
        del n2
        save(**inputs)
        out = self._mlp_output(inputs)
        save(mlp_out=out)
        return self._residual.term("mlp_post_norm", out).add_(x_mid), saved

    def backward(self, dy_CE: Tensor, *, saved: Saved, gradients: GradientSink) -> Tensor:
        """Return the gradient of the layer input ``[C, E]``; consumes ``saved``.

        Tensors missing from ``saved`` are recomputed. Saved tensors are overwritten and become
        operands of weight gradients: if ``gradients`` stores its operands, the tensors in ``saved``
        must own their memory.
        """
        x_in = saved.pop("x_in")
        n1 = self._residual.normed_input("attention_norm", x_in)
        q_projected, q = self._queries(n1, saved)
        if "o" in saved:
            o, lse = saved.pop("o"), saved.pop("lse")
        else:
            self._provide_lacking(n1)
            o_CND, lse = self._with_sinks_(*self.attention.recompute(q))
            o = o_CND.flatten(1)
        out, x_mid = self._out_and_middle(x_in, o, saved)
        dx_mid = self._mlp_backward(dy_CE, x_mid, saved, gradients)
        del x_mid
        dout = self._residual.term_backward("attention_post_norm", dx_mid, out, gradients)
        del out
        back = self._projection("o").backward(self.tokens.gather(dout))
        del dout
        back.parameter_gradients(o, gradients)
        do_CND = back.input_gradient().view_as(q)
        del back
        self._provide_lacking(n1)
        if self.model.attention_sinks and gradients.trains(_SINKS):
            gradients.add(_SINKS, sink_gradient(do_CND, o.view_as(q), lse, self.weights[_SINKS]))
        dq, dk, dv = self.attention.backward(do_CND, q, o.view_as(do_CND), lse)
        del o, do_CND
        dq = self._heads.norm_and_rotate_backward("q", dq, q_projected, gradients)
        k_projected = self._projected_keys(n1, saved)
        dk = self._heads.norm_and_rotate_backward("k", dk, k_projected, gradients)
        dn1 = self._heads.project_backward(dq, dk, dv, n1, gradients)
        return self._residual.normed_input_backward("attention_norm", dn1, x_in, dx_mid, gradients)

    def recompute_missing_rows(self, saved: Saved) -> None:
        """Recompute the last rows of each tensor of which only the first rows were saved.

        Tensors that were not saved at all are left to :meth:`backward`, except o and lse if a
        partly saved x_mid or attention_out needs o. Each product has fewer rows than in forward,
        which some kernels round differently. With sharded weights no tensor is saved in part, and
        nothing is done.
        """
        x_in = saved["x_in"]
        tokens = x_in.shape[0]
        cut = {name: rows for name, t in saved.items() if (rows := rows_of(name, t)) < tokens}
        for name in cut.keys() & {"q", "k"}:
            n1 = self._residual.normed_input("attention_norm", x_in[cut[name] :])
            rest = self._heads.project(name, n1)
            if not self.model.qk_norm:
                rest = self._heads.norm_and_rotate(name, rest, first=cut[name])
            saved[name] = torch.cat([saved[name], rest])
        of_attention = cut.keys() & {"x_mid", "attention_out"}
        if "o" in cut or (of_attention and "o" not in saved):
            self._attend_rest(saved)
        for name in of_attention:
            rows = cut[name]
            rest = self._attention_output(saved["o"][rows:])
            if name == "x_mid":
                rest = self._residual.add_attention(x_in[rows:], rest)
            saved[name] = torch.cat([saved[name], rest])
        if cut.keys() & (self._mlp.names | {"mlp_out"}):
            self._append_mlp_rows(saved, cut)

    def _append_mlp_rows(self, saved: Saved, cut: Mapping[str, int]) -> None:
        """Append the missing rows of the MLP's tensors of which only the first rows were saved.

        All of them are saved up to the same row; others of the MLP's tensors have all rows.
        """
        names = self._mlp.names
        (rows,) = {cut[name] for name in cut.keys() & (names | {"mlp_out"})}
        n2 = self._residual.normed_input("mlp_norm", self._saved_middle(saved, rows))
        known = {name: saved[name][rows:] for name in (names & saved.keys()) - cut.keys()}
        rest = self._mlp.inputs(n2, known)
        if "mlp_out" in cut:
            rest["mlp_out"] = self._mlp_output(rest)
        for name in cut.keys() & rest.keys():
            saved[name] = torch.cat([saved[name], rest[name]])

    def _attend_rest(self, saved: Saved) -> None:
        """Append the missing rows of o and lse to ``saved``, or all rows if none were saved."""
        done = saved["o"].shape[0] if "o" in saved else 0
        q = saved.get("q")
        if q is None:
            n1 = self._residual.normed_input("attention_norm", saved["x_in"][done:])
            q = self._heads.project("q", n1)
        else:
            q = q[done:]
        if self.model.qk_norm or "q" not in saved:
            q = self._heads.norm_and_rotate("q", q, first=done)
        if self.attention.lacks_keys:
            self.recompute_kv(saved["x_in"])
        o_CND, lse_NC = self._with_sinks_(*self.attention.recompute(q))
        if done:
            saved["o"] = torch.cat([saved["o"], o_CND.flatten(1)])
            saved["lse"] = torch.cat([saved["lse"], lse_NC], dim=1)
        else:
            saved["o"], saved["lse"] = o_CND.flatten(1), lse_NC

    def recompute_kv(self, x_CE: Tensor) -> None:
        """Provide k and v to attention again, bitwise equal to those of :meth:`forward`."""
        self._provide(self._residual.normed_input("attention_norm", x_CE))

    def _provide_lacking(self, n1_CE: Tensor) -> None:
        """Provide k and v to attention in backward if it lacks them."""
        if self.attention.lacks_keys:
            self._provide(n1_CE)

    def _provide(self, n1_CE: Tensor) -> None:
        k, v = (self._heads.project(name, n1_CE) for name in ("k", "v"))
        self.attention.provide(self._heads.norm_and_rotate("k", k), v)

    def recompute_output(self, saved: Saved) -> Tensor:
        """Return the output ``[C, E]`` from the saved x_in and o, without recomputing attention.

        Adds all that it computes to ``saved``, so that :meth:`backward` need not recompute it.
        """
        if not saved.keys() & {"x_mid", "attention_out"}:
            out = self._attention_output(saved["o"])
            if self.model.norms_outputs:
                saved["attention_out"] = out
            else:
                saved["x_mid"] = self._residual.add_attention(saved["x_in"], out)
        x_mid = self._saved_middle(saved)
        if "mlp_out" in saved:
            return self._residual.term("mlp_post_norm", saved["mlp_out"]).add_(x_mid)
        if not self._mlp.names <= saved.keys():
            n2 = self._residual.normed_input("mlp_norm", x_mid)
            known = {name: saved[name] for name in self._mlp.names & saved.keys()}
            saved.update(self._mlp.inputs(n2, known))
            del n2
        out = self._mlp_output(saved)
        if self.model.norms_outputs:
            saved["mlp_out"] = out
        return self._residual.term("mlp_post_norm", out).add_(x_mid)

    def _attention_inputs(
        self, x_CE: Tensor, save: Callable[..., None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q_CND, k_CKD, v_CKD) after norms and rotation; save q, and k before its norm."""
        n1 = self._residual.normed_input("attention_norm", x_CE)
        q, k, v = (self._heads.project(name, n1) for name in ("q", "k", "v"))
        del n1
        if self.model.qk_norm:
            save(q=q, k=k)
        q = self._heads.norm_and_rotate("q", q)
        k = self._heads.norm_and_rotate("k", k)
        if not self.model.qk_norm:
            save(q=q)
        return q, k, v

    def _queries(self, n1_CE: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor]:
        """Return (projected, rotated) queries ``[C, N, D]``; projected is None without q/k-norm."""
        q = saved.pop("q", None)
        if q is not None and not self.model.qk_norm:
            return None, q
        if q is None:
            q = self._heads.project("q", n1_CE)
        rotated = self._heads.norm_and_rotate("q", q)
        return (q if self.model.qk_norm else None), rotated

    def _projected_keys(self, n1_CE: Tensor, saved: Saved) -> Tensor | None:
        """Return the keys before their norm, or None without q/k-norm."""
        if not self.model.qk_norm:
            return None
        k = saved.pop("k", None)
        return self._heads.project("k", n1_CE) if k is None else k

    def _with_sinks_(self, o_CND: Tensor, lse_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of attention, overwritten, as it is beside the sinks, if any."""
        if self.model.attention_sinks:
            lse_NC = apply_sinks_(o_CND, lse_NC, self.weights[_SINKS])
        return o_CND, lse_NC

    def _attention_output(self, o_CQ: Tensor) -> Tensor:
        """Return the projection of o, ``[C, E]``, in new memory."""
        return self.tokens.scatter_sum(self._projection("o").forward(o_CQ))

    def _mlp_output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the MLP, ``[C, E]``, in new memory."""
        return self.tokens.scatter_sum(self._mlp.output(inputs))

    def _saved_middle(self, saved: Saved, rows: int = 0) -> Tensor:
        """Return ``x_mid`` of the tokens from ``rows`` on, saved or from its saved terms."""
        if not self.model.norms_outputs:
            return saved["x_mid"][rows:]
        return self._residual.add_attention(saved["x_in"][rows:], saved["attention_out"][rows:])

    def _out_and_middle(
        self, x_in_CE: Tensor, o_CQ: Tensor, saved: Saved
    ) -> tuple[Tensor | None, Tensor]:
        """Return (attention_out if it has a norm of its own, x_mid), which leave ``saved``."""
        x_mid, out = saved.pop("x_mid", None), saved.pop("attention_out", None)
        if x_mid is not None:
            return None, x_mid
        if out is None:
            out = self._attention_output(o_CQ)
        x_mid = self._residual.add_attention(x_in_CE, out)
        return (out if self.model.norms_outputs else None), x_mid

    def _mlp_backward(
        self, dy_CE: Tensor, x_mid_CE: Tensor, saved: Saved, gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of ``x_mid`` through the MLP and the residual connection."""
        n2 = self._residual.normed_input("mlp_norm", x_mid_CE)
        inputs = {name: saved.pop(name) for name in self._mlp.names & saved.keys()}
        out = saved.pop("mlp_out", None)
        if out is None and self.model.norms_outputs:
            inputs = self._mlp.inputs(n2, inputs)
            out = self._mlp_output(inputs)
        dout = self._residual.term_backward("mlp_post_norm", dy_CE, out, gradients)
        del out
        dn2 = self._mlp.backward(self.tokens.gather(dout), n2, inputs, gradients)
        del dout
        return self._residual.normed_input_backward("mlp_norm", dn2, x_mid_CE, dy_CE, gradients)

    @property
    def _residual(self) -> Residual:
        return Residual(self.model, self.weights, self.tokens)

    @property
    def _heads(self) -> Heads:
        return Heads(self.model, self.weights, self.rotary, self.adapter_scale)

    @property
    def _mlp(self) -> Mlp:
        if "router.weight" in self.weights:
            return ExpertMlp(self.model, self.weights, self.adapter_scale, self.routing)
        return DenseMlp(self.model, self.weights, self.adapter_scale)

    def _projection(self, name: str) -> Projection:
        return Projection(name, self.weights, self.adapter_scale)


def token_dimension(name: str) -> int:
    """Return the dimension of the saved tensor ``name`` along which its tokens lie."""
    return 1 if name == "lse" else 0


def rows_of(name: str, tensor: Tensor) -> int:
    """Return the number of tokens in the saved tensor ``name``."""
    return tensor.shape[token_dimension(name)]
