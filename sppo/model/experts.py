"""Mixture of experts in place of a layer's MLP, written out forward and backward.

Each token passes through the k experts that the router chooses (:mod:`sppo.model.router`), and no
token is dropped. The C k pairs of a token and an expert are sorted by expert for the products with
the experts' weights, and are in the order of the tokens everywhere else, so that their tensors may
be saved, offloaded and recomputed by tokens. The weight of an expert multiplies the input of
``down``, not its output, so that no tensor of C k rows of E must be saved.

        inputs       meaning                                       shape
    chosen       chosen experts, int16                             [C, k]
    weights      weights of the chosen experts; never saved        [C, k] in fp32
    gate, up     projections by the experts of each token          [C, k F]
    shared_gate, shared_up    those of the shared MLP, if any      [C, Fs]

Tokens are independent, so they pass through the experts in tiles of T tokens, and tensors that are
sorted by expert have R = T k rows whatever the routing;
:mod:`sppo.cost.live_sets.expert_live_sets` lists the tensors that are live at once.

Legend: C tokens, T tokens of a tile, E hidden, X experts, k experts per token, F MLP width of an
expert, R rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.config.model import Experts, ModelConfig
from sppo.cost.tiles import expert_tile_tokens
from sppo.kernels import elementwise
from sppo.kernels.grouped import grouped_input_gradient, grouped_linear
from sppo.kernels.linear import add_product_, wide_linear
from sppo.model.gradients import GradientSink
from sppo.model.mlp import NOTHING, DenseMlp
from sppo.model.projection import Projection
from sppo.model.router import (
    RoutingTerms,
    choose,
    logits_gradient,
    router_logits,
    weights_of_chosen,
)

_OWN = frozenset({"chosen", "weights", "gate", "up"})


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """:class:`sppo.model.mlp.Mlp` of which every token passes through the experts it chooses.

    Attributes:
        model: Shape of the model.
        weights: Weights of the layer, by name within it.
        adapter_scale: Factor of the product of the factors of an adapter of the shared MLP.
        terms: Terms of the routing beside the router's logits.
    """

    model: ModelConfig
    weights: Mapping[str, Tensor]
    adapter_scale: float
    terms: RoutingTerms

    @property
    def names(self) -> frozenset[str]:
        """Names of the inputs of the experts and of the shared MLP."""
        return _OWN if self._shared is None else _OWN | self._shared.names

    def inputs(self, n2_CE: Tensor, known: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return choice, weights and projections of the tokens; never chooses where it is known."""
        found = dict(known)
        if not {"chosen", "weights"} <= found.keys():
            logits_CX = router_logits(n2_CE, self.weights)
            if "chosen" not in found:
                found["chosen"] = choose(logits_CX, self._experts, self.terms.choice_bias_X)
            found["weights"] = weights_of_chosen(logits_CX, found["chosen"], self._experts)
            del logits_CX
        missing = [name for name in ("up", "gate") if name not in found]
        width = self._experts.per_token * self._experts.mlp_size
        projected = {name: n2_CE.new_empty(n2_CE.shape[0], width) for name in missing}
        for tile in self._tiles(n2_CE) if missing else ():
            self._project(n2_CE[tile], found["chosen"][tile], into=_rows(projected, tile))
        found |= projected
        return found if self._shared is None else self._shared.inputs(n2_CE, found)

    def output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over the experts of each token, and the shared MLP, ``[C, E]``."""
        gate = inputs["gate"]
        out = gate.new_empty(gate.shape[0], self.model.hidden_size)
        own = {name: inputs[name] for name in _OWN}
        for tile in self._tiles(gate):
            self._experts_output(_rows(own, tile), into_TE=out[tile])
        if self._experts.bias:
            bias_XE = self.weights["expert_down.bias"]
            add_product_(out, self._weights_of_all(inputs).to(out.dtype), bias_XE)
        if self._shared is not None:
            out += self._shared.output(inputs)
        return out

    def backward(
        self,
        dy_CE: Tensor,
        n2_CE: Tensor,
        inputs: dict[str, Tensor],
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of ``n2_CE``; see :meth:`sppo.model.mlp.Mlp.backward`."""
        assert "chosen" in inputs, "backward must not choose again"
        inputs.update(self.inputs(n2_CE, inputs))
        dweights_Ck = torch.zeros_like(inputs["weights"])
        if self._experts.bias:
            self._output_bias_backward(dy_CE, inputs, dweights_Ck, gradients)
        chosen_Ck = inputs["chosen"]
        own, dn2 = {name: inputs.pop(name) for name in _OWN}, torch.empty_like(n2_CE)
        for tile in self._tiles(n2_CE, whole=not gradients.takes_tiles):
            of_tile = _Gradients(dy_CE[tile], dweights_Ck[tile], dn2[tile])
            self._experts_backward(n2_CE[tile], _rows(own, tile), of_tile, gradients)
        own.clear()
        if self._shared is not None:
            dn2 += self._shared.backward(dy_CE, n2_CE, inputs, gradients)
        logits_CX = router_logits(n2_CE, self.weights)
        dlogits_CX = logits_gradient(dweights_Ck, logits_CX, chosen_Ck, self._experts, self.terms)
        back = Projection("router", self.weights, 1.0).backward(dlogits_CX.to(n2_CE.dtype))
        back.parameter_gradients(n2_CE, gradients)
        return back.input_gradient(add_to_CI=dn2)

    def _experts_output(self, inputs: Mapping[str, Tensor], *, into_TE: Tensor) -> None:
        """Write the sum over the experts of each token of a tile, without biases of ``down``."""
        order = ExpertOrder.of(inputs["chosen"], self._experts.count)
        hidden = elementwise.activation(inputs["gate"], inputs["up"], kind=self.model.mlp)
        weigh_(hidden, inputs["weights"])
        hidden_RF = order.rows_of_pairs(hidden)
        del hidden
        y_RE = grouped_linear(hidden_RF, self.weights["expert_down.weight"], order.offsets_X)
        del hidden_RF
        order.sum_of_pairs(y_RE, into_TE=into_TE)

    def _experts_backward(
        self,
        n2_TE: Tensor,
        inputs: Mapping[str, Tensor],
        of_tile: _Gradients,
        sink: GradientSink,
    ) -> None:
        """Write the gradient of a tile through the experts; add to that of the weights.

        With h the activation, w its weight and dh = dy W_down: d(w) = sum(dh h), d(h) = w dh.
        """
        weights_Tk, gate, up = (inputs[name] for name in ("weights", "gate", "up"))
        order = ExpertOrder.of(inputs["chosen"], self._experts.count)
        dy_RE = order.rows_of_tokens(of_tile.dy_TE)
        down_XEF = self.weights["expert_down.weight"]
        dhidden = torch.empty_like(up)
        order.write_pairs(grouped_input_gradient(dy_RE, down_XEF, order.offsets_X), dhidden)
        hidden = elementwise.activation(gate, up, kind=self.model.mlp).mul_(dhidden)
        dweights_Tk = of_tile.dweights_Tk
        dweights_Tk += by_expert(hidden, weights_Tk).sum(-1, dtype=dweights_Tk.dtype)
        del hidden
        weigh_(dhidden, weights_Tk)
        inner = elementwise.activation_backward_(dhidden, gate, up, kind=self.model.mlp)
        del dhidden, gate, up
        hidden, dgate, dup = inner.hidden_CF, inner.dgate_CF, inner.dup_CF
        assert dgate is not None, "experts have a gate"
        projections = {"gate": dgate, "up": dup}
        del inner, dgate, dup
        if sink.trains("expert_down.weight"):
            hidden_RF = order.rows_of_pairs(weigh_(hidden, weights_Tk))
            order.give(sink, "expert_down.weight", dy_RE, hidden_RF)
            del hidden_RF
        del dy_RE, hidden
        x_RE = order.rows_of_tokens(n2_TE)
        dx_RE = self._projection_backward("up", projections, x_RE, order, sink)
        dx_RE += self._projection_backward("gate", projections, x_RE, order, sink)
        del x_RE
        order.sum_of_pairs(dx_RE, into_TE=of_tile.dn2_TE)

    def _projection_backward(
        self,
        name: str,
        projections: dict[str, Tensor],
        x_RE: Tensor,
        order: ExpertOrder,
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of the rows ``x_RE`` through "gate" or "up", which is consumed."""
        dy_RF, name = order.rows_of_pairs(projections.pop(name)), f"expert_{name}"
        if gradients.trains(f"{name}.weight"):
            order.give(gradients, f"{name}.weight", dy_RF, x_RE)
        if self._experts.bias and gradients.trains(f"{name}.bias"):
            order.give(gradients, f"{name}.bias", dy_RF, dy_RF.new_ones(dy_RF.shape[0], 1))
        return grouped_input_gradient(dy_RF, self.weights[f"{name}.weight"], order.offsets_X)

    def _output_bias_backward(
        self,
        dy_CE: Tensor,
        inputs: Mapping[str, Tensor],
        dweights_Ck: Tensor,
        gradients: GradientSink,
    ) -> None:
        """Add the gradient of the weights through the bias of ``down``; give that of the bias."""
        bias_XE, weights_CX = self.weights["expert_down.bias"], self._weights_of_all(inputs)
        of_all_CX = wide_linear(dy_CE, bias_XE)
        dweights_Ck += of_all_CX.gather(1, inputs["chosen"].long())
        if gradients.trains("expert_down.bias"):
            gradients.product("expert_down.bias", dy_CO=weights_CX.to(dy_CE.dtype), x_CI=dy_CE)

    def _project(self, n2_TE: Tensor, chosen_Tk: Tensor, *, into: Mapping[str, Tensor]) -> None:
        """Write the projections "gate" and "up" by the experts of each token of a tile."""
        order = ExpertOrder.of(chosen_Tk, self._experts.count)
        x_RE = order.rows_of_tokens(n2_TE)
        for name, out in into.items():
            weight_XFE = self.weights[f"expert_{name}.weight"]
            order.write_pairs(grouped_linear(x_RE, weight_XFE, order.offsets_X), out)
            if self._experts.bias:
                out += self.weights[f"expert_{name}.bias"][chosen_Tk.long()].flatten(1)

    def _tiles(self, x_CE: Tensor, *, whole: bool = False) -> Iterator[slice]:
        """Yield slices of the tokens that pass through the experts at once."""
        tokens = x_CE.shape[0]
        size = tokens if whole else expert_tile_tokens(self._experts, device=x_CE.device.type)
        for start in range(0, tokens, max(1, size)):
            yield slice(start, min(start + size, tokens))

    def _weights_of_all(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the weights of all experts, 0 of those that are not chosen, ``[C, X]``."""
        weights_Ck = inputs["weights"]
        nothing_CX = weights_Ck.new_zeros(weights_Ck.shape[0], self._experts.count)
        return nothing_CX.scatter_(1, inputs["chosen"].long(), weights_Ck)

    @property
    def _experts(self) -> Experts:
        assert self.model.experts is not None, "a routed layer has experts"
        return self.model.experts

    @property
    def _shared(self) -> SharedMlp | None:
        if not self._experts.shared_mlp_size:
            return None
        own = DenseMlp(self.model, self.weights, self.adapter_scale, prefix="shared_")
        return SharedMlp(own, self._experts.shared_switch)


class _Gradients(NamedTuple):
    """Gradients of a tile in its experts' backward."""

    dy_TE: Tensor
    """Gradient of the output."""
    dweights_Tk: Tensor
    """Gradient of the weights of the chosen experts, to which that through the experts is added."""
    dn2_TE: Tensor
    """Memory of the gradient of the tokens."""


class ExpertOrder(NamedTuple):
    """Pairs of a token and an expert, sorted by expert."""

    pairs_R: Tensor
    """Number of each row's pair; the pairs of a token follow one another."""
    per_token: int
    """k: number of experts of a token."""
    offsets_X: Tensor
    """End of the rows of each expert, int32."""

    @staticmethod
    def of(chosen_Ck: Tensor, count: int) -> ExpertOrder:
        """Return the order of the experts that tokens chose, of ``count`` experts."""
        experts_R, pairs_R = torch.sort(chosen_Ck.flatten(), stable=True)
        every_X = torch.arange(count, dtype=chosen_Ck.dtype, device=chosen_Ck.device)
        offsets_X = torch.searchsorted(experts_R, every_X, right=True, out_int32=True)
        return ExpertOrder(pairs_R, chosen_Ck.shape[1], offsets_X)

    def rows_of_tokens(self, x_CE: Tensor) -> Tensor:
        """Return the rows of tokens, ``[R, E]``."""
        return x_CE.index_select(0, self.pairs_R // self.per_token)

    def rows_of_pairs(self, x_CK: Tensor) -> Tensor:
        """Return the rows of pairs that are side by side in tokens, ``[R, F]`` of ``[C, k F]``."""
        return x_CK.reshape(len(self.pairs_R), -1).index_select(0, self.pairs_R)

    def write_pairs(self, x_RF: Tensor, into_CK: Tensor) -> None:
        """Write rows to their pairs, which are side by side in tokens."""
        into_CK.view(x_RF.shape).index_copy_(0, self.pairs_R, x_RF)

    def sum_of_pairs(self, x_RE: Tensor, *, into_TE: Tensor) -> None:
        """Write the sum of the rows of each token, ``[T, E]``, always in the same order."""
        pairs_RE = torch.empty_like(x_RE)
        self.write_pairs(x_RE, pairs_RE)
        torch.sum(pairs_RE.view(-1, self.per_token, x_RE.shape[1]), 1, out=into_TE)

    def give(self, gradients: GradientSink, name: str, dy_RO: Tensor, x_RI: Tensor) -> None:
        """Give the operands of the gradients of stacked matrices to a sink."""
        gradients.expert_products(name, dy_RO=dy_RO, x_RI=x_RI, offsets_X=self.offsets_X)


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """MLP that every token passes through beside its experts, whose output it may switch.

    Attributes:
        mlp: The MLP.
        switched: Whether the output is multiplied by the sigmoid of a projection of the token.
    """

    mlp: DenseMlp
    switched: bool

    @property
    def names(self) -> frozenset[str]:
        """Names of the inputs of the activation, and of the switch, which is never saved."""
        return self.mlp.names | ({"shared_switch"} if self.switched else frozenset())

    def inputs(self, n2_CE: Tensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``known`` with the projections of the tokens."""
        found = self.mlp.inputs(n2_CE, known)
        if self.switched:
            found["shared_switch"] = self._switch.forward(n2_CE).sigmoid_()
        return found

    def output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output ``[C, E]``."""
        out = self.mlp.output(inputs)
        return out.mul_(inputs["shared_switch"]) if self.switched else out

    def backward(
        self, dy_CE: Tensor, n2_CE: Tensor, inputs: dict[str, Tensor], gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of ``n2_CE``; see :meth:`sppo.model.mlp.Mlp.backward`."""
        if not self.switched:
            return self.mlp.backward(dy_CE, n2_CE, inputs, gradients)
        switch_C1 = inputs.pop("shared_switch")
        dswitch_C1 = self.mlp.output(inputs).mul_(dy_CE).sum(1, keepdim=True)
        back = self._switch.backward(dswitch_C1 * switch_C1 * (1 - switch_C1))
        dn2 = self.mlp.backward(dy_CE * switch_C1, n2_CE, inputs, gradients)
        back.parameter_gradients(n2_CE, gradients)
        return back.input_gradient(add_to_CI=dn2)

    @property
    def _switch(self) -> Projection:
        return Projection("shared_switch", self.mlp.weights, self.mlp.adapter_scale)


def _rows(tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return the same rows of several tensors."""
    return {name: tensor[rows] for name, tensor in tensors.items()}


def by_expert(x_CK: Tensor, weights_Ck: Tensor) -> Tensor:
    """Return vectors of each token's experts that are side by side in a row, ``[C, k, F]``."""
    return x_CK.view(*weights_Ck.shape, -1)


def weigh_(hidden_CK: Tensor, weights_Ck: Tensor) -> Tensor:
    """Multiply the vectors of each token's experts by their weights, in place."""
    by_expert(hidden_CK, weights_Ck).mul_(weights_Ck.unsqueeze(-1))
    return hidden_CK
