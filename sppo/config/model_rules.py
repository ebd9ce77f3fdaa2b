"""Rules about the model of a run, and about what of it trains: see :mod:`sppo.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from sppo.config.huggingface.families import FAMILIES
from sppo.config.run import RunConfig

Broken = Iterator[tuple[str, str]]
"""Path of each key that a run may not have as it is, and what to write instead."""


def _experts_are_whole(run: RunConfig) -> Broken:
    """Sharded weights (Megatron) have no experts: every device has all experts of its layers."""
    if run.model.experts is not None and run.parallel.sequence_parallel == "megatron":
        yield (
            "parallel.sequence_parallel",
            "shards the weights of layers, but not those of model.experts; write ulysses, which "
            "shards tokens",
        )


def _norms_have_all_heads(run: RunConfig) -> Broken:
    """Sharded weights (Megatron) leave each device some heads, too few for a norm over all."""
    if run.model.qk_norm == "all" and run.parallel.sequence_parallel == "megatron":
        yield (
            "parallel.sequence_parallel",
            "gives each device some of the heads, and model.qk_norm=all norms q and k over all of "
            "them; write ulysses, which shards tokens",
        )


def _linear_attention_is_served(run: RunConfig) -> Broken:
    """Linear attention has whole weights on every device, and runs from every layer's input."""
    if run.model.linear_attention is None:
        return
    if run.parallel.sequence_parallel == "megatron":
        yield (
            "parallel.sequence_parallel",
            "shards the weights of layers, but not those of model.linear_attention; write ulysses, "
            "which shards tokens",
        )
    if run.activations.input_every > 1:
        yield (
            "activations.input_every",
            "runs a layer again for the input of the next, and layers with model.linear_attention "
            "would need states of their own for that; write 1",
        )


def _routing_suits_model(run: RunConfig) -> Broken:
    """Keys of ``routing`` need experts, and ``routing.bias_update`` a bias to update."""
    experts = run.model.experts
    if experts is None:
        for key, value in run.routing:
            if value:
                yield f"routing.{key}", "belongs to model.experts, which this model has none of"
    elif run.routing.bias_update and not experts.choice_bias:
        yield (
            "routing.bias_update",
            "updates the biases by which experts are chosen; write model.experts.choice_bias=true, "
            "or balance the load by routing.balance_loss",
        )


def _adapter_suits_model(run: RunConfig) -> Broken:
    """``adapter.layers`` and ``adapter.targets`` name layers and projections of the model."""
    if run.adapter is None:
        return
    layers, targets = run.adapter.layers, run.adapter.targets
    last = run.model.num_layers - 1
    if layers is not None and layers[-1] > last:
        yield "adapter.layers", f"beyond the last layer of the model, {last}; leave those out"
    if targets is not None and "gate" in targets and not run.model.gated:
        rule = f"model.mlp={run.model.mlp} has no gate projection; write targets without gate"
        yield "adapter.targets", rule
    experts, of_mlp = run.model.experts, {"gate", "up", "down"}.intersection(targets or ())
    numbers = range(run.model.num_layers) if layers is None else layers
    adapted = [run.model.layer_type(layer) for layer in numbers]
    all_routed = all(own.routed for own in adapted)
    if of_mlp and experts and not experts.shared_mlp_size and all_routed:
        rule = (
            "gate, up and down are those of an MLP that all tokens pass through, and no layer with "
            "an adapter has one; experts have no adapters, write targets of q, k, v, o"
        )
        yield "adapter.targets", rule
    if {"q", "k", "v", "o"}.intersection(targets or ()) and all(own.linear for own in adapted):
        rule = (
            "q, k, v and o are those of attention, and all layers with an adapter have linear "
            "attention instead; write targets of gate, up, down, or other adapter.layers"
        )
        yield "adapter.targets", rule


def _trained_are_named_once(run: RunConfig) -> Broken:
    """``train.only`` and ``adapter`` exclude each other, which has ``adapter.also_train``."""
    if run.adapter is not None and run.train.only is not None:
        yield (
            "train.only",
            "the adapter trains, and beside it only what adapter.also_train names, such as norms; "
            "leave train.only out, or leave out the section adapter",
        )


def _family_computes_it(run: RunConfig) -> Broken:
    """The family that ``model.family`` names computes exactly this model, so it can be exported."""
    family = run.model.family
    reasons = () if family is None else FAMILIES[family].misfits(run.model)
    if reasons:
        rule = f"does not compute this model: {'; '.join(reasons)}; use another family, or null"
        yield "model.family", rule


def _positions_reach(run: RunConfig) -> Broken:
    """No sequence, also of a validation, is longer than the table of learned positions."""
    rows = run.model.max_positions
    if run.model.position != "learned" or rows is None:
        return
    rule = f"longer than the {rows} learned positions; "
    if run.sequence.length > rows:
        yield "sequence.length", f"{rule}raise model.max_positions or shorten it"
    for name, own in run.evaluated_sets.items():
        if own.length is not None and own.length > rows:
            yield "validation.sets", f"{name}: length {own.length} is {rule}shorten it"


MODEL_RULES = (
    _experts_are_whole,
    _norms_have_all_heads,
    _linear_attention_is_served,
    _routing_suits_model,
    _adapter_suits_model,
    _trained_are_named_once,
    _family_computes_it,
    _positions_reach,
)
