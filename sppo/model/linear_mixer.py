"""Linear attention as the token mixer of a layer, forward and backward (Gated DeltaNet).

Convolution and rule (:mod:`sppo.model.recurrence`) are an argument, so the mixer does not depend on
where states are kept, other subsequences or other ranks. Each head of their output o is normed, by
a weight that is never an offset from one, and multiplied by silu of a projection of the token::

    out = linear_o(norm(o) * silu(linear_gate(n1)))

o is not saved: the backward of the rule begins with its forward anyway. All weights are in the
compute dtype, those from which decays are made as well: the models are published with weights that
are rounded to bf16, and the rule itself computes in fp32.

Legend: C tokens, E hidden, I width of the inputs of the recurrence, H value heads, D size of a
value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels.elementwise import activation, activation_backward_
from sppo.model.gradients import GradientSink
from sppo.model.mixer import Inputs, Save, Saved
from sppo.model.norms import norm, norm_backward
from sppo.model.projection import Projection, ProjectionBackward, backward_of_all

_INPUTS, _GATE = "linear_inputs", "linear_gate"
_PROJECTIONS = {
    _INPUTS: ("linear_q", "linear_k", "linear_v", "linear_decay", "linear_beta"),
    _GATE: ("linear_gate",),
}
"""Projections that lie beside each other in each saved tensor."""
_NORM = "linear_norm"


class SubsequenceRecurrence(Protocol):
    """Convolution and gated delta rule of one subsequence in one layer, from the state before it.

    It has the weights ``conv_*`` and ``decay.*`` of the layer. Its inputs are the projections of a
    token to queries, keys and values, then to decays and to strengths, beside each other.
    """

    def forward(self, inputs_CI: Tensor) -> Tensor:
        """Return the output ``[C, H, D]``, and keep the state behind the subsequence."""
        ...

    def recompute(self, inputs_CI: Tensor) -> Tensor:
        """Return the output of :meth:`forward` again, and keep nothing."""
        ...

    def backward(self, do_CHD: Tensor, inputs_CI: Tensor, gradients: GradientSink) -> Tensor:
        """Return the gradient of ``inputs_CI``, in new memory.

        Includes what later subsequences have from the state, and hands the gradient of the state
        before the subsequence on to the earlier one. The gradients of weights that train go to
        ``gradients``.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinearMixer:
    """:class:`sppo.model.mixer.Mixer` with linear attention.

    Attributes:
        model: Shape of the model.
        weights: Weights of the layer, by name within it.
        recurrence: Convolution and rule of the tokens.
    """

    model: ModelConfig
    weights: Mapping[str, Tensor]
    recurrence: SubsequenceRecurrence

    def forward(self, n1_CE: Tensor, save: Save) -> Tensor:
        """Return the output ``[C, E]``; keep the state behind the tokens."""
        made = {name: self._project(name, n1_CE) for name in _PROJECTIONS}
        del n1_CE
        save(**made)
        return self._projected(self.recurrence.forward(made.pop(_INPUTS)), made.pop(_GATE))

    def recompute_missing_rows(self, saved: Saved, cut: Mapping[str, int], inputs: Inputs) -> None:
        """Recompute the last rows of the projections that ``saved`` has in part."""
        for name in cut.keys() & _PROJECTIONS.keys():
            saved[name] = torch.cat([saved[name], self._project(name, inputs(cut[name]))])

    def output(self, saved: Saved, inputs: Inputs, *, first: int = 0) -> Tensor:
        """Return the output of the tokens from number ``first`` on; adds o to ``saved``."""
        self._complete(saved, inputs)
        return self._projected(saved["o"][first:], saved[_GATE][first:])

    def begin_backward(self, n1_CE: Tensor, saved: Saved) -> None:
        """Recompute nothing: the MLP's backward comes first."""

    def backward(
        self, dy_CE: Tensor, n1_CE: Tensor, saved: Saved, gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of ``n1_CE``; see :meth:`sppo.model.mixer.Mixer.backward`."""
        self._complete(saved, lambda first: n1_CE[first:])
        back = self._projection("linear_o").backward(dy_CE)
        del dy_CE
        do_CHD, dgate = self._norm_and_gate_backward(
            back, saved.pop("o"), saved.pop(_GATE), gradients
        )
        del back
        dinputs = self.recurrence.backward(do_CHD, saved.pop(_INPUTS), gradients)
        del do_CHD
        beside = {_INPUTS: dinputs, _GATE: dgate}
        columns = (pair for name, dy in beside.items() for pair in self._columns(name, dy))
        backs = [projection.backward(dy) for projection, dy in columns]
        return backward_of_all(backs, n1_CE, gradients)

    def recompute_kv(self, n1_CE: Tensor) -> None:
        """Keep nothing: later subsequences read the state alone, which is never recomputed."""

    def _complete(self, saved: Saved, inputs: Inputs) -> None:
        """Add the projections and o to ``saved`` where they are missing."""
        for name in _PROJECTIONS:
            if name not in saved:
                saved[name] = self._project(name, inputs(0))
        if "o" not in saved:
            saved["o"] = self.recurrence.recompute(saved[_INPUTS])

    def _project(self, name: str, n1_CE: Tensor) -> Tensor:
        """Return the tokens' projections of a saved tensor, beside each other."""
        width = sum(len(self._projection(part).weight_OI) for part in _PROJECTIONS[name])
        made = n1_CE.new_empty(len(n1_CE), width)
        for projection, columns in self._columns(name, made):
            columns.copy_(projection.forward(n1_CE))
        return made

    def _columns(self, name: str, x: Tensor) -> Iterator[tuple[Projection, Tensor]]:
        """Yield each projection of a saved tensor, and its columns of ``x``."""
        parts = [self._projection(part) for part in _PROJECTIONS[name]]
        widths = [len(part.weight_OI) for part in parts]
        return zip(parts, torch.split(x, widths, dim=1), strict=True)

    def _projected(self, o_CHD: Tensor, gate: Tensor) -> Tensor:
        """Return the projection of o behind its norm and its gate, ``[C, E]``."""
        normed = norm(self.model, _NORM, o_CHD, self.weights).flatten(1)
        del o_CHD
        hidden = activation(gate, normed, kind="swiglu")
        del normed, gate
        return self._projection("linear_o").forward(hidden)

    def _norm_and_gate_backward(
        self, back: ProjectionBackward, o_CHD: Tensor, gate: Tensor, gradients: GradientSink
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of o and, in its place, of the gate."""
        normed = norm(self.model, _NORM, o_CHD, self.weights).flatten(1)
        inner = activation_backward_(back.input_gradient(), gate, normed, kind="swiglu")
        back.parameter_gradients(inner.hidden_CF, gradients)
        do_CHD = inner.dup_CF.view_as(o_CHD)
        return norm_backward(self.model, _NORM, do_CHD, o_CHD, self.weights, gradients), gate

    def _projection(self, name: str) -> Projection:
        return Projection(name, self.weights, scale=1.0)
