"""Attention as the token mixer of a layer, forward and backward.

Attention itself is an argument, so the mixer does not depend on K/V storage, other subsequences or
other ranks. With an ``attention_gate``, o is multiplied by the sigmoid of a projection of the token
before its own projection.

Legend: C tokens, E hidden, Q = N D query width, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sppo.kernels.sinks import apply_sinks_, sink_gradient
from sppo.model.gradients import GradientSink
from sppo.model.heads import Heads
from sppo.model.mixer import Inputs, Save, Saved, token_dimension
from sppo.model.projection import backward_of_all

_GATE, _SINKS = "attention_gate", "sinks.weight"


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
class AttentionMixer:
    """:class:`sppo.model.mixer.Mixer` with attention.

    Attributes:
        heads: Projections, norms and rotation.
        attention: Attention of the tokens over their prefix and themselves.
    """

    heads: Heads
    attention: SubsequenceAttention

    def forward(self, n1_CE: Tensor, save: Save) -> Tensor:
        """Return the output ``[C, E]``; store k and v."""
        q, k, v = (self.heads.project(name, n1_CE) for name in ("q", "k", "v"))
        gate = (
            self.heads.projection(_GATE).forward(n1_CE) if self.heads.model.attention_gate else None
        )
        del n1_CE
        if gate is not None:
            save(attention_gate=gate)
        if self.heads.model.qk_norm:
            save(q=q, k=k)
        q = self.heads.norm_and_rotate("q", q)
        k = self.heads.norm_and_rotate("k", k)
        if not self.heads.model.qk_norm:
            save(q=q)
        o_CND, lse = self._with_sinks_(*self.attention.forward(q, k, v))
        del q, k, v
        save(o=o_CND.flatten(1), lse=lse)
        return self._projected(o_CND.flatten(1), gate)

    def recompute_missing_rows(self, saved: Saved, cut: Mapping[str, int], inputs: Inputs) -> None:
        """Recompute the last rows of the mixer's tensors that ``saved`` has in part."""
        for name in cut.keys() & {"q", "k"}:
            rest = self.heads.project(name, inputs(cut[name]))
            if not self.heads.model.qk_norm:
                rest = self.heads.norm_and_rotate(name, rest, first=cut[name])
            saved[name] = torch.cat([saved[name], rest])
        if _GATE in cut:
            rest = self.heads.projection(_GATE).forward(inputs(cut[_GATE]))
            saved[_GATE] = torch.cat([saved[_GATE], rest])
        if "o" in cut:
            self._attend_rest(saved, inputs)

    def output(self, saved: Saved, inputs: Inputs, *, first: int = 0) -> Tensor:
        """Return the projection of o, of the tokens from number ``first`` on."""
        if "o" not in saved:
            self._attend_rest(saved, inputs)
        gate = self._complete_gate(saved, inputs)
        return self._projected(saved["o"][first:], None if gate is None else gate[first:])

    def begin_backward(self, n1_CE: Tensor, saved: Saved) -> None:
        """Recompute q, o and lse; ``rotated`` has the queries that attention reads."""
        projected, saved["rotated"] = self._queries(n1_CE, saved)
        if projected is not None:
            saved["q"] = projected
        if "o" not in saved:
            saved["o"], saved["lse"] = self._attend(saved["rotated"], lambda first: n1_CE[first:])

    def backward(
        self, dy_CE: Tensor, n1_CE: Tensor, saved: Saved, gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of ``n1_CE``; see :meth:`sppo.model.mixer.Mixer.backward`."""
        gate = self._complete_gate(saved, lambda first: n1_CE[first:])
        saved.pop(_GATE, None)
        q, o, lse = (saved.pop(name) for name in ("rotated", "o", "lse"))
        back = self.heads.projection("o").backward(dy_CE)
        del dy_CE
        back.parameter_gradients(o if gate is None else _gated(o, gate), gradients)
        do_CND = back.input_gradient().view_as(q)
        del back
        if gate is not None:
            _gated_backward_(do_CND.flatten(1), o, gate)
        if self.attention.lacks_keys:
            self.recompute_kv(n1_CE)
        if self.heads.model.attention_sinks and gradients.trains(_SINKS):
            gradients.add(
                _SINKS, sink_gradient(do_CND, o.view_as(q), lse, self.heads.weights[_SINKS])
            )
        dq, dk, dv = self.attention.backward(do_CND, q, o.view_as(do_CND), lse)
        del o, do_CND
        dq = self.heads.norm_and_rotate_backward("q", dq, saved.pop("q", None), gradients)
        k_projected = self._projected_keys(n1_CE, saved)
        dk = self.heads.norm_and_rotate_backward("k", dk, k_projected, gradients)
        projected = {"q": dq.flatten(1), "k": dk.flatten(1), "v": dv.flatten(1)}
        if gate is not None:
            projected[_GATE] = gate
        backs = [self.heads.projection(name).backward(dy) for name, dy in projected.items()]
        return backward_of_all(backs, n1_CE, gradients)

    def recompute_kv(self, n1_CE: Tensor) -> None:
        """Provide k and v to attention again, bitwise equal to those of :meth:`forward`."""
        k, v = (self.heads.project(name, n1_CE) for name in ("k", "v"))
        self.attention.provide(self.heads.norm_and_rotate("k", k), v)

    def _attend_rest(self, saved: Saved, inputs: Inputs) -> None:
        """Append the missing rows of o and lse to ``saved``, or all rows if none were saved."""
        done = saved["o"].shape[0] if "o" in saved else 0
        q = saved["q"][done:] if "q" in saved else self.heads.project("q", inputs(done))
        if self.heads.model.qk_norm or "q" not in saved:
            q = self.heads.norm_and_rotate("q", q, first=done)
        for name, rest in zip(("o", "lse"), self._attend(q, inputs), strict=True):
            saved[name] = torch.cat([saved[name], rest], token_dimension(name)) if done else rest

    def _attend(self, q_CND: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return (o_CQ, lse_NC) of queries at the end again, in backward."""
        if self.attention.lacks_keys:
            self.recompute_kv(inputs(0))
        o_CND, lse_NC = self._with_sinks_(*self.attention.recompute(q_CND))
        return o_CND.flatten(1), lse_NC

    def _complete_gate(self, saved: Saved, inputs: Inputs) -> Tensor | None:
        """Return the gate, which is in ``saved`` from now on; None if the model has none."""
        if self.heads.model.attention_gate and _GATE not in saved:
            saved[_GATE] = self.heads.projection(_GATE).forward(inputs(0))
        return saved.get(_GATE)

    def _projected(self, o_CQ: Tensor, gate_CQ: Tensor | None) -> Tensor:
        """Return the projection of o, behind its gate if any, ``[C, E]``."""
        o_CQ = o_CQ if gate_CQ is None else _gated(o_CQ, gate_CQ)
        return self.heads.projection("o").forward(o_CQ)

    def _queries(self, n1_CE: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor]:
        """Return (projected, rotated) queries ``[C, N, D]``; projected is None without q/k-norm."""
        q = saved.pop("q", None)
        if q is not None and not self.heads.model.qk_norm:
            return None, q
        if q is None:
            q = self.heads.project("q", n1_CE)
        rotated = self.heads.norm_and_rotate("q", q)
        return (q if self.heads.model.qk_norm else None), rotated

    def _projected_keys(self, n1_CE: Tensor, saved: Saved) -> Tensor | None:
        """Return the keys before their norm, or None without q/k-norm."""
        if not self.heads.model.qk_norm:
            return None
        k = saved.pop("k", None)
        return self.heads.project("k", n1_CE) if k is None else k

    def _with_sinks_(self, o_CND: Tensor, lse_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of attention, overwritten, as it is beside the sinks, if any."""
        if self.heads.model.attention_sinks:
            lse_NC = apply_sinks_(o_CND, lse_NC, self.heads.weights[_SINKS])
        return o_CND, lse_NC


def _gated(o_CQ: Tensor, gate_CQ: Tensor) -> Tensor:
    """Return ``o * sigmoid(gate)``."""
    return gate_CQ.sigmoid().mul_(o_CQ)


def _gated_backward_(dy_CQ: Tensor, o_CQ: Tensor, gate_CQ: Tensor) -> None:
    """Turn the gradient of :func:`_gated` into that of o, and the gate into its gradient."""
    sigmoid_CQ = gate_CQ.sigmoid()
    gate_CQ.copy_(torch.ops.aten.sigmoid_backward(dy_CQ * o_CQ, sigmoid_CQ))
    dy_CQ.mul_(sigmoid_CQ)
