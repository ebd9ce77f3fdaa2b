"""Global names and shapes of all parameters of a model, as used by all parts of the trainer.

Names do not depend on stage, rank or schedule, so a checkpoint written with one layout can be read
with another. Linear weights are stored ``[outputs, inputs]``.

The experts of a layer are stacked: ``expert_gate.weight`` is ``[X, F, E]``.

A layer with linear attention has parameters of its own in place of those of attention.

Legend: V vocabulary, E hidden, N query heads, K key/value heads, D head size, F MLP width, X
experts.
"""

from __future__ import annotations

from math import prod

from sppo.config.model import Experts, LinearAttention, ModelConfig

Shape = tuple[int, ...]

KEYS = ("k", "v")
"""Projections that Megatron shards by key/value heads, of which there may be fewer than devices."""
ROWS = ("q", *KEYS, "attention_gate", "sinks", "gate", "up")
COLUMNS = ("o", "down")
"""Projections that Megatron shards by columns; one device holds the bias, which is added to the
group's sum. `ROWS` are sharded by rows, including their biases, and sinks by heads."""

_KINDS = {
    **dict.fromkeys(("embed", "positions"), "embed"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
    **dict.fromkeys(("shared_gate", "shared_up", "shared_down", "shared_switch"), "mlp"),
    **dict.fromkeys(("expert_gate", "expert_up", "expert_down"), "experts"),
    "router": "router",
    "head": "head",
}


def layer_shapes(model: ModelConfig, layer: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of a layer, by name without the ``layers.i.`` prefix."""
    kind = model.layer_type(layer)
    linear = model.linear_attention_of(kind)
    shapes = _norm("attention_norm", model) if model.norms_inputs else {}
    if linear is not None:
        shapes |= _linear_attention_shapes(linear, width=model.hidden_size)
    else:
        shapes |= _attention_shapes(model)
    if model.norms_outputs:
        shapes |= _norm("attention_post_norm", model)
    if model.norms_inputs:
        shapes |= _norm("mlp_norm", model)
    experts, e = model.experts_of(kind), model.hidden_size
    if experts is not None:
        shapes |= _expert_shapes(experts, width=e)
    else:
        shapes |= _mlp("", e, model.mlp_size, gated=model.gated, bias=model.mlp_bias)
    if model.norms_outputs:
        shapes |= _norm("mlp_post_norm", model)
    return shapes


def _attention_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of attention, from its projections to that of its output."""
    e, d = model.hidden_size, model.head_dim
    heads, kv_heads, bias = model.num_heads, model.kv_heads, model.qkv_bias
    shapes: dict[str, Shape] = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes |= _linear(name, count * d, e, bias=bias)
    if model.attention_gate:
        shapes |= _linear("attention_gate", heads * d, e, bias=bias)
    if model.qk_norm is not None:
        normed = {"q_norm": heads, "k_norm": kv_heads}
        shapes |= {
            f"{name}.weight": (count * d if model.qk_norm == "all" else d,)
            for name, count in normed.items()
        }
    if model.attention_sinks:
        shapes["sinks.weight"] = (heads,)
    return shapes | _linear("o", e, heads * d, bias=model.output_bias)


def _linear_attention_shapes(linear: LinearAttention, *, width: int) -> dict[str, Shape]:
    """Return the shapes of linear attention, from its projections to that of its output.

    ``linear_gate`` is multiplied with the normed output, ``linear_decay`` and ``linear_beta`` are
    the projections from which the decay and the strength of each token's update are made.
    ``decay.log_rate`` and ``decay.bias`` are ``A_log`` and ``dt_bias`` elsewhere.
    """
    keys, values, heads = linear.keys_width, linear.values_width, linear.value_heads
    shapes: dict[str, Shape] = {}
    rows = {"q": keys, "k": keys, "v": values, "gate": values, "decay": heads, "beta": heads}
    for name, size in rows.items():
        shapes |= _linear(f"linear_{name}", size, width, bias=False)
    for name, size in (("q", keys), ("k", keys), ("v", values)):
        shapes[f"conv_{name}.weight"] = (size, linear.conv_size)
    shapes |= {"decay.log_rate": (heads,), "decay.bias": (heads,)}
    shapes["linear_norm.weight"] = (linear.value_size,)
    return shapes | _linear("linear_o", width, values, bias=False)


def _mlp(prefix: str, width: int, size: int, *, gated: bool, bias: bool) -> dict[str, Shape]:
    shapes = _linear(f"{prefix}gate", size, width, bias=bias) if gated else {}
    shapes |= _linear(f"{prefix}up", size, width, bias=bias)
    return shapes | _linear(f"{prefix}down", width, size, bias=bias)


def _expert_shapes(experts: Experts, *, width: int) -> dict[str, Shape]:
    """Return the shapes of a router, of all experts stacked, and of a shared MLP."""
    shapes = _linear("router", experts.count, width, bias=experts.router_bias)
    own = _mlp("expert_", width, experts.mlp_size, gated=True, bias=experts.bias)
    shapes |= {name: (experts.count, *shape) for name, shape in own.items()}
    if experts.shared_mlp_size:
        shapes |= _mlp("shared_", width, experts.shared_mlp_size, gated=True, bias=False)
    if experts.shared_switch:
        shapes |= _linear("shared_switch", 1, width, bias=False)
    return shapes


def outer_parts(model: ModelConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes of parameters used before the layers, and of those used after.

    They are embedding and learned positions, and the final norm and the head. A tied embedding is
    in both.
    """
    vocabulary = (model.vocab_size, model.hidden_size)
    before: dict[str, Shape] = {"embed.weight": vocabulary}
    if model.position == "learned":
        assert model.max_positions is not None, "ModelConfig checks this"
        before["positions.weight"] = (model.max_positions, model.hidden_size)
    head = "embed.weight" if model.tie_embeddings else "head.weight"
    return before, _norm("final_norm", model) | {head: vocabulary}


def outer_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of parameters outside layers: embedding, positions, final norm, head."""
    before, behind = outer_parts(model)
    return before | behind


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all parameters by global name: embedding, layers, final norm, head."""
    shapes, behind = outer_parts(model)
    for index in range(model.num_layers):
        shapes |= _of_layer(model, index)
    return shapes | behind


def _of_layer(model: ModelConfig, index: int) -> dict[str, Shape]:
    return {f"layers.{index}.{name}": shape for name, shape in layer_shapes(model, index).items()}


def choice_bias(layer: int) -> str:
    """Return the global name of the buffer with the biases by which a layer's experts are chosen.

    It is no parameter: it has no gradient, is in fp32 in every run, and all ranks hold it.
    """
    return f"layers.{layer}.router.choice_bias"


def choice_bias_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the biases by which experts are chosen, by global name."""
    if model.experts is None or not model.experts.choice_bias:
        return {}
    routed = (layer for layer in range(model.num_layers) if model.layer_type(layer).routed)
    return {choice_bias(layer): (model.experts.count,) for layer in routed}


def num_parameters(model: ModelConfig) -> int:
    """Return the number of scalars of the whole model."""
    return sum(prod(shape) for shape in parameter_shapes(model).values())


def active_parameters(model: ModelConfig) -> int:
    """Return the number of scalars that each token passes through: of experts, those it chooses."""
    found = 0
    for name, shape in parameter_shapes(model).items():
        size = prod(shape)
        if model.experts is not None and parameter_kind(name) == "experts":
            size = size // model.experts.count * model.experts.per_token
        found += size
    return found


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies: to matrices and embeddings.

    It does not apply to biases, those of experts included, to norms, sinks and rates of decay.
    """
    return not name.endswith(("bias", "norm.weight", "sinks.weight", "decay.log_rate"))


def parameter_kind(name: str) -> str:
    """Return the kind of a parameter: embed, attention, mlp, router, experts, norm or head."""
    module = name.split(".")[-2]
    return _KINDS.get(module, "norm" if module.endswith("norm") else "attention")


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (model.hidden_size,)}
    if model.norm == "layernorm":
        shapes[f"{name}.bias"] = (model.hidden_size,)
    return shapes


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def stage_shapes(model: ModelConfig, layers: range) -> dict[str, Shape]:
    """Return the shapes of the parameters of the stage that holds `layers`, by global name.

    The first stage has the embedding, the last one the final norm and the head. If embedding and
    head are tied, both stages have `embed.weight`, and its gradients must be added up.
    """
    before, behind = outer_parts(model)
    held = before if layers.start == 0 else {}
    for index in layers:
        held |= _of_layer(model, index)
    held |= behind if layers.stop == model.num_layers else {}
    return {name: shape for name, shape in parameter_shapes(model).items() if name in held}
