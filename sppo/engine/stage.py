"""A run of consecutive layers on one rank, with the embedding and the head where it has them.

``forward`` and ``backward`` take one unit, a (sequence, subsequence) pair. On the last stage the
loss and the gradient of its input are formed in forward, tile by tile, so logits never wait for
backward.

Legend: C tokens of the subsequence, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from torch import Tensor
from torch.nn import functional

from sppo.config.model import ModelConfig
from sppo.engine.kv_store import KVStore
from sppo.engine.span_attention import StoredAttention
from sppo.engine.unit import Unit
from sppo.kernels.attention import Backend
from sppo.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_with_gradient
from sppo.kernels.rotary import RotaryTable
from sppo.model.gradients import GradientSum
from sppo.model.layer import Layer, Saved, norm, norm_backward
from sppo.model.rope import rotary_table
from sppo.offload.stack_store import slot_bytes
from sppo.offload.store import ActivationKey, ActivationStore
from sppo.planning.activation_policy import tensor_bytes_per_token


class Stage:
    """Layers ``[first, last)`` of a model, run unit by unit.

    Args:
        model: the shape.
        weights: all parameters of the stage by global name, in the compute dtype.
        gradients: fp32 (float64) buffers by global name, added to; None for forward only.
        activations: where saved tensors wait.
        keep: names of the tensors each layer saves.
        keep_of: the same for subsequences that differ, by their index.
        input_every: layers that keep their attention output save their input only in every so
            manyth layer; the others get it from the layer below, see :meth:`_rebuild_input`.
        layers: half-open range of layers; None for all.
        attention_backend: of :func:`sppo.kernels.attention.attention_forward`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor] | None,
        activations: ActivationStore,
        keep: frozenset[str],
        keep_of: Mapping[int, frozenset[str]] | None = None,
        input_every: int = 1,
        layers: range | None = None,
        attention_backend: Backend = "auto",
    ) -> None:
        self.model = model
        self._layers = range(model.num_layers) if layers is None else layers
        self._weights, self._gradients = weights, gradients
        self._activations, self._keep, self._keep_of = activations, keep, keep_of or {}
        self._input_every = input_every
        self._backend: Backend = attention_backend
        first = next(iter(weights.values()))
        self._dtype = first.dtype
        self.kv = KVStore(model, dtype=first.dtype, device=first.device)
        self._layer = Layer(model)
        self._layer_weights = {i: _local(weights, f"layers.{i}.") for i in self._layers}
        self._layer_gradients = {i: _local(gradients or {}, f"layers.{i}.") for i in self._layers}
        self._token_losses: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def is_first(self) -> bool:
        """Whether the stage holds the embedding."""
        return self._layers.start == 0

    @cached_property
    def is_last(self) -> bool:
        """Whether the stage holds the final norm and the head."""
        return self._layers.stop == self.model.num_layers

    def forward(
        self, unit: Unit, x_CE: Tensor | None, *, loss_scale: float | None
    ) -> Tensor | None:
        """Run one unit forward.

        Args:
            unit: its tokens are read on the first stage, its labels on the last.
            x_CE: output of the previous stage; None on the first.
            loss_scale: factor of the summed loss; None runs forward only, nothing is saved.

        Returns:
            Output ``[C, E]`` for the next stage, None on the last.
        """
        training = loss_scale is not None
        x = self._embed(unit) if x_CE is None else x_CE
        rotary = self._rotary(unit)
        for index in self._layers:
            x, saved = self._layer.forward(
                x,
                self._layer_weights[index],
                rotary=rotary,
                attention=self._attention(unit, index),
                keep=self._kept(unit, index) if training else frozenset(),
            )
            if training:
                self._activations.save(_key(unit, index), saved)
        if not self.is_last:
            return x
        self._loss(unit, x, loss_scale)
        return None

    def backward(self, unit: Unit, dy_CE: Tensor | None) -> Tensor | None:
        """Run one unit backward.

        Args:
            unit: as given to :meth:`forward`; units of a sequence come in descending order.
            dy_CE: gradient of the output; None on the last stage.

        Returns:
            Gradient of the input ``[C, E]``, None on the first stage.
        """
        assert self._gradients is not None, "a stage without gradient buffers runs forward only"
        if dy_CE is None:
            dy_CE = self._activations.take(self._head_key(unit))["dx"]
        dx = dy_CE
        rotary = self._rotary(unit)
        taken: dict[int, Saved] = {}
        for index in reversed(self._layers):
            if index > self._layers.start and index - 1 not in taken:
                self._activations.prefetch(_key(unit, index - 1))
            saved = taken.pop(index, None) or self._activations.take(_key(unit, index))
            if "x_in" not in saved:
                self._rebuild_input(unit, index, saved, taken)
            dx = self._layer.backward(
                dx,
                self._layer_weights[index],
                saved=saved,
                gradients=GradientSum(self._layer_gradients[index]),
                rotary=rotary,
                attention=self._attention(unit, index),
            )
        if unit.span.start == 0:
            self.kv.release(unit.sequence)
        if not self.is_first:
            return dx
        self._embed_backward(unit, dx)
        return None

    def _rebuild_input(self, unit: Unit, index: int, saved: Saved, taken: dict[int, Saved]) -> None:
        """Put x_in into ``saved`` of layer ``index``: the output of the layers below it.

        Given a layer's o, the residual stream goes on without attention: x_mid = x_in + o W_o,
        y = x_mid + MLP(x_mid), one product more per token than rebuilding the layer itself. What
        is taken out of the store on the way waits in ``taken`` for its own turn.
        """
        below = index - 1
        if below not in taken:
            taken[below] = self._activations.take(_key(unit, below))
        if "x_in" not in taken[below]:
            self._rebuild_input(unit, below, taken[below], taken)
        saved["x_in"] = self._layer.output_again(taken[below], self._layer_weights[below])

    def pop_losses(self, sequence: int, subsequence: int) -> Tensor:
        """Unscaled loss of each token of a unit, ``[C]``; last stage only, once per unit."""
        return self._token_losses.pop((sequence, subsequence))

    def release_sequence(self, sequence: int) -> None:
        """Free a sequence's K/V after a forward-only pass."""
        self.kv.release(sequence)

    def assert_idle(self) -> None:
        """Nothing may be left after a step: every saved tensor was used exactly once."""
        leftovers = {
            "activations": self._activations.num_entries,
            "sequences in the KV store": self.kv.num_sequences,
            "token losses": len(self._token_losses),
        }
        assert not any(leftovers.values()), f"left over after the step: {leftovers}"

    def discard(self) -> None:
        """Forget all state of a step that failed."""
        self._activations.discard()
        self.kv.discard()
        self._token_losses.clear()

    def saved_bytes(self, units: Iterable[Unit]) -> int:
        """Bytes that the activation store holds once all of ``units`` ran forward."""
        element_bytes = self._dtype.itemsize
        sizes = tensor_bytes_per_token(self.model, element_bytes=element_bytes)
        total = 0
        for unit in units:
            tokens = unit.tokens_C.shape[0]
            for index in self._layers:
                total += sum(slot_bytes((tokens,), sizes[n]) for n in self._kept(unit, index))
            head = slot_bytes((tokens, self.model.hidden_size), element_bytes)
            total += head if self.is_last else 0
        return total

    def _kept(self, unit: Unit, index: int) -> frozenset[str]:
        """Names of the tensors that layer ``index`` saves of a unit."""
        keep = self._keep_of.get(unit.subsequence, self._keep)
        has_own_input = (index - self._layers.start) % self._input_every == 0
        return keep if has_own_input or "o" not in keep else keep - {"x_in"}

    def _head_key(self, unit: Unit) -> ActivationKey:
        return _key(unit, self.model.num_layers)

    @property
    def _head(self) -> str:
        return "embed.weight" if self.model.tie_embeddings else "head.weight"

    def _rotary(self, unit: Unit) -> RotaryTable | None:
        if self.model.position != "rotary":
            return None
        return rotary_table(self.model, unit.positions_C, dtype=self._dtype)

    def _attention(self, unit: Unit, index: int) -> StoredAttention:
        window = self.model.window_of(index)
        return StoredAttention(self.kv, index, unit.sequence, unit.span, window, self._backend)

    def _embed(self, unit: Unit) -> Tensor:
        x = functional.embedding(unit.tokens_C, self._weights["embed.weight"])
        if self.model.position == "learned":
            x = x + functional.embedding(unit.positions_C, self._weights["positions.weight"])
        return x

    def _embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        assert self._gradients is not None, "checked by backward"
        embed = self._gradients["embed.weight"]
        embed.index_add_(0, unit.tokens_C, dx_CE.to(embed.dtype))
        if self.model.position == "learned":
            positions = self._gradients["positions.weight"]
            positions.index_add_(0, unit.positions_C, dx_CE.to(positions.dtype))

    def _loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        key = (unit.sequence, unit.subsequence)
        hidden = norm(self.model, "final_norm", x_CE, self._weights)
        weight = self._weights[self._head]
        if loss_scale is None:
            self._token_losses[key] = linear_cross_entropy(hidden, weight, unit.labels_C)
            return
        assert self._gradients is not None, "training needs gradient buffers"
        losses, dhidden = linear_cross_entropy_with_gradient(
            hidden,
            weight,
            unit.labels_C,
            scale=loss_scale,
            dweight_VE=self._gradients[self._head],
        )
        self._token_losses[key] = losses
        sink = GradientSum(self._gradients)
        dx = norm_backward(self.model, "final_norm", dhidden, x_CE, self._weights, sink)
        self._activations.save(self._head_key(unit), {"dx": dx})


def _key(unit: Unit, layer: int) -> ActivationKey:
    return ActivationKey(unit.sequence, unit.subsequence, layer)


def _local(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
