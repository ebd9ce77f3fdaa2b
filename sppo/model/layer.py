"""One transformer layer, written out forward and backward over the tokens of a subsequence.

The layer does not use autograd: every tensor that backward may need has a name, so that a plan can
retain, offload or recompute it and its bytes are counted exactly. What lets tokens read earlier
ones is an argument, the mixer (:mod:`sppo.model.mixer`).

        saved           meaning                             recomputed from
    x_in            layer input                         nothing: always saved
    q               rotated queries (with q/k-norm: the projection before its norm)   x_in
    k               keys before their norm, q/k-norm only                             x_in
    o, lse          attention output and log-sum-exp, with sinks if any   q, by attention
    attention_gate  projection whose sigmoid multiplies o, if any       x_in
    linear_inputs   in place of q, k, o: queries, keys, values, decays and strengths   x_in
    linear_gate     projection whose silu multiplies the output of linear attention    x_in
    x_mid           residual stream after attention     x_in, o
    attention_out   projection of o, in place of x_mid if it has a norm of its own     o
    gate            gate projection (gated MLPs only)   x_mid
    up              up projection                       x_mid
    mlp_out         output of the MLP, if it has a norm of its own                     gate, up

:mod:`sppo.model.residual` says where the norms are.

Legend: C tokens, E hidden, Q = N D query width, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.model.experts import ExpertMlp
from sppo.model.gradients import GradientSink
from sppo.model.mixer import Inputs, Mixer, Saved, token_dimension
from sppo.model.mlp import DenseMlp, Mlp
from sppo.model.residual import Residual, TokenExchange
from sppo.model.router import NO_TERMS, RoutingTerms

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Arithmetic of one layer for the tokens of one subsequence.

    With sharded weights (:mod:`sppo.parallel.megatron`), tensors of the residual stream and the
    terms that are added to it have c of the C tokens, and all other tensors have all C.

    Attributes:
        model: Shape of the model; the number of heads and the MLP width follow the weights.
        weights: Weights of the layer, by name within it.
        mixer: Attention of the tokens, with its projections.
        tokens: Collectives of the ranks over which the residual stream's tokens are sharded.
        adapter_scale: Factor of the product of the factors of an adapter.
        routing: Terms of the routing of the tokens to experts.
    """

    model: ModelConfig
    weights: Weights
    mixer: Mixer
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
        out = self.tokens.scatter_sum(
            self.mixer.forward(self._residual.normed_input("attention_norm", x_CE), save)
        )
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
        x_in = saved["x_in"]
        n1 = self._residual.normed_input("attention_norm", x_in)
        self.mixer.begin_backward(n1, saved)
        self._complete_middle(saved, lambda first: n1[first:])
        x_mid = self._saved_middle(saved)
        saved.pop("x_mid", None)
        dx_mid = self._mlp_backward(dy_CE, x_mid, saved, gradients)
        del x_mid
        dn1 = self.mixer.backward(
            self._mixer_gradient(dx_mid, saved, gradients), n1, saved, gradients
        )
        del saved["x_in"]
        return self._residual.normed_input_backward("attention_norm", dn1, x_in, dx_mid, gradients)

    def recompute_missing_rows(self, saved: Saved) -> None:
        """Recompute the last rows of each tensor of which only the first rows were saved.

        Tensors that were not saved at all are left to :meth:`backward`, except those of the mixer
        if a partly saved x_mid or attention_out needs them. Each product has fewer rows than in
        forward, which some kernels round differently. With sharded weights no tensor is saved in
        part, and nothing is done.
        """
        tokens = saved["x_in"].shape[0]
        rows_of = {name: t.shape[token_dimension(name)] for name, t in saved.items()}
        cut = {name: rows for name, rows in rows_of.items() if rows < tokens}
        self.mixer.recompute_missing_rows(saved, cut, self._mixer_inputs(saved))
        for name in cut.keys() & {"x_mid", "attention_out"}:
            rows = cut[name]
            rest = self._mixer_output(saved, self._mixer_inputs(saved), first=rows)
            if name == "x_mid":
                rest = self._residual.add_attention(saved["x_in"][rows:], rest)
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

    def recompute_kv(self, x_CE: Tensor) -> None:
        """Keep the keys and values of :meth:`forward` again, bitwise equal."""
        self.mixer.recompute_kv(self._residual.normed_input("attention_norm", x_CE))

    def recompute_output(self, saved: Saved) -> Tensor:
        """Return the output ``[C, E]`` from the saved x_in and o, without recomputing attention.

        Adds all that it computes to ``saved``, so that :meth:`backward` need not recompute it.
        """
        self._complete_middle(saved, self._mixer_inputs(saved))
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

    def _mixer_inputs(self, saved: Saved) -> Inputs:
        """Return the function that recomputes the mixer's input."""
        return lambda first: self._residual.normed_input("attention_norm", saved["x_in"][first:])

    def _mixer_output(self, saved: Saved, inputs: Inputs, *, first: int = 0) -> Tensor:
        """Return the output of the mixer, of the tokens from ``first`` on, in new memory."""
        return self.tokens.scatter_sum(self.mixer.output(saved, inputs, first=first))

    def _mlp_output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the MLP, ``[C, E]``, in new memory."""
        return self.tokens.scatter_sum(self._mlp.output(inputs))

    def _complete_middle(self, saved: Saved, inputs: Inputs) -> None:
        """Add x_mid to ``saved``, or attention_out if that has a norm, unless it is there."""
        if saved.keys() & {"x_mid", "attention_out"}:
            return
        out = self._mixer_output(saved, inputs)
        if self.model.norms_outputs:
            saved["attention_out"] = out
        else:
            saved["x_mid"] = self._residual.add_attention(saved["x_in"], out)

    def _saved_middle(self, saved: Saved, rows: int = 0) -> Tensor:
        """Return ``x_mid`` of the tokens from ``rows`` on, saved or from its saved terms."""
        if not self.model.norms_outputs:
            return saved["x_mid"][rows:]
        return self._residual.add_attention(saved["x_in"][rows:], saved["attention_out"][rows:])

    def _mixer_gradient(self, dx_mid_CE: Tensor, saved: Saved, gradients: GradientSink) -> Tensor:
        """Return the gradient of the mixer's output; removes attention_out from ``saved``."""
        out = saved.pop("attention_out", None)
        dout = self._residual.term_backward("attention_post_norm", dx_mid_CE, out, gradients)
        return self.tokens.gather(dout)

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
    def _mlp(self) -> Mlp:
        if "router.weight" in self.weights:
            return ExpertMlp(self.model, self.weights, self.adapter_scale, self.routing)
        return DenseMlp(self.model, self.weights, self.adapter_scale)
