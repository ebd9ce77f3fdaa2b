"""One layer by itself, over a sequence that is one subsequence."""

import torch

from sppo.activations.tensor_classes import tensor_bytes_per_token
from sppo.cost.parameters import layer_shapes
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.model.attention_mixer import AttentionMixer
from sppo.model.gradients import GradientSum, zero_gradients
from sppo.model.heads import Heads
from sppo.model.layer import Layer
from sppo.model.linear_mixer import LinearMixer
from sppo.model.recurrence import Recurrence
from sppo.model.rope import RotaryTables

LINEAR_ATTENTION = {"key_heads": 2, "value_heads": 4, "key_size": 6, "value_size": 8}
HYBRID = {"layer_types": ["linear", "full"], "linear_attention": LINEAR_ATTENTION}
MIXERS = {
    "attention gate, sinks, biases": {
        "attention_gate": True,
        "attention_sinks": True,
        "qkv_bias": True,
    },
    "linear": HYBRID,
    "linear, both norms": HYBRID
    | {"norm_placement": "both", "norm_offset": True, "residual_scale": 0.7},
    "linear, experts": HYBRID | {"experts": {"count": 4, "per_token": 2, "mlp_size": 8}},
    "linear, wide convolution": HYBRID
    | {
        "linear_attention": LINEAR_ATTENTION
        | {"key_heads": 4, "key_size": 10, "value_size": 4, "conv_size": 7}
    },
}
"""Models of which the first layer has a gate or linear attention."""


class WholeSequence:
    """Attention of a sequence that is one subsequence."""

    lacks_keys = False

    def __init__(self):
        self.recomputed = 0

    def forward(self, q, k, v):
        self._k, self._v = k.clone(), v.clone()
        return attention_forward(AttentionCall(q, self._k, self._v))

    def recompute(self, q):
        self.recomputed += 1
        return attention_forward(AttentionCall(q, self._k, self._v))

    def backward(self, do, q, o, lse):
        dk, dv = torch.zeros_like(self._k), torch.zeros_like(self._v)
        dq = attention_backward(
            AttentionCall(q, self._k, self._v), do, o, lse, dk_TKD=dk, dv_TKD=dv
        )
        return dq, dk, dv


class WholeRecurrence:
    """Recurrence of a sequence that is one subsequence."""

    def __init__(self, linear, weights, starts=()):
        self._linear, self._weights, self._starts, self.recomputed = linear, weights, starts, 0

    def forward(self, inputs):
        return Recurrence(self._weights, self._linear, inputs, self._starts).forward(None)[0]

    def recompute(self, inputs):
        self.recomputed += 1
        return self.forward(inputs)

    def backward(self, do, inputs, gradients):
        recurrence = Recurrence(self._weights, self._linear, inputs, self._starts)
        dinputs, dweights, _ = recurrence.backward(do, None, None)
        for name, gradient in dweights.items():
            gradients.add(name, gradient)
        return dinputs


def layer_weights(model, layer=0, *, dtype=torch.float64):
    """Random weights of a layer; half of the heads of linear attention remember many tokens."""
    torch.manual_seed(0)
    weights = {
        name: 0.4 * torch.randn(shape, dtype=torch.float64) + (len(shape) == 1)
        for name, shape in layer_shapes(model, layer).items()
    }
    if model.layer_type(layer).linear:
        weights["decay.log_rate"][::2].uniform_(0.001, 0.05).log_()
    return {name: weight.to(dtype) for name, weight in weights.items()}


class OneLayer:
    """Forward of the first layer of a model, then any number of backwards.

    Args:
        model: Model of the layer.
        tokens: Number of tokens.
        starts: Tokens with which documents begin, but for the first one; with linear attention.
        dtype: Dtype of all tensors.
    """

    def __init__(self, model, *, tokens=11, starts=(), dtype=torch.float64):
        self.model, self.weights = model, layer_weights(model, dtype=dtype)
        self.x, self.dy = torch.randn(2, tokens, model.hidden_size, dtype=torch.float64).to(dtype)
        linear = model.linear_attention_of(model.layer_type(0))
        if linear is None:
            rotary = RotaryTables(model, torch.arange(tokens), dtype=dtype).of_layer(0)
            self.core = WholeSequence()
            mixer = AttentionMixer(Heads(model, self.weights, rotary), self.core)
        else:
            self.core = WholeRecurrence(linear, self.weights, starts)
            mixer = LinearMixer(model, self.weights, self.core)
        self.layer = Layer(model, self.weights, mixer)

    @property
    def everything(self):
        """Names of all tensors that the layer may save."""
        return frozenset(self.bytes_per_token)

    @property
    def bytes_per_token(self):
        """Bytes per token of each tensor that the layer may save."""
        size = self.x.element_size()
        return tensor_bytes_per_token(self.model, self.model.layer_type(0), element_bytes=size)

    def forward(self, keep=None):
        """Return (output, saved tensors), of all or of those named in ``keep``."""
        with torch.no_grad():
            return self.layer.forward(self.x, keep=self.everything if keep is None else keep)

    def backward(self, saved):
        """Return the gradients of the input and, by name, of the weights."""
        gradients = zero_gradients(self.weights)
        with torch.no_grad():
            self.layer.recompute_missing_rows(saved)
            dx = self.layer.backward(self.dy.clone(), saved=saved, gradients=GradientSum(gradients))
        return dx, gradients
