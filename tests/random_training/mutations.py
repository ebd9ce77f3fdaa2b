"""Defects for mutation tests, each as a context: the random trainings must find all of them.

The defects do not stop a training: no shape changes and nothing is raised. Only numbers are wrong,
most of them only for some combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from sppo.config.model import Rotation
from sppo.cost.trainable import is_factor
from sppo.engine import engine, stage_providers
from sppo.engine.attention import kv_store, partial_kv, prefix_attention
from sppo.engine.expert_loads import ExpertLoads
from sppo.engine.providers.sharded_gradients import ShardedGradients
from sppo.kernels import elementwise
from sppo.model import attention_mixer, rope
from sppo.model.experts import ExpertMlp
from sppo.model.gradients import DeferredGradients
from sppo.model.layer import Layer
from sppo.model.projection import Projection
from sppo.model.residual import Residual
from sppo.model.router import choose, router_logits
from sppo.offload.block_store import BlockStore
from sppo.optim.adamw import AdamW
from sppo.optim.sharded_state import ShardedState
from sppo.parallel import pipeline_p2p
from sppo.parallel.megatron import WeightSharding
from sppo.parallel.row_messages import RowBuckets, RowMessage
from sppo.parallel.ulysses import UlyssesAllToAll
from tests.random_training.case import Case

Mutation = Callable[[], AbstractContextManager[Any]]


@contextmanager
def lent_operands() -> Iterator[None]:
    """Deferred weight gradients copy only operands that are smaller than their storage.

    So they keep the KV store's whole dV buffer, which the next sequence writes over.
    """
    unchanged = DeferredGradients.product

    def retained(operand: torch.Tensor) -> torch.Tensor:
        own_bytes = operand.numel() * operand.element_size()
        return operand.clone() if operand.untyped_storage().nbytes() > own_bytes else operand

    def product(self: Any, name: str, *, dy_CO: torch.Tensor, x_CI: torch.Tensor) -> None:
        unchanged(self, name, dy_CO=retained(dy_CO), x_CI=retained(x_CI))

    def by_token(x_CKD: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return x_CKD.to(dtype, memory_format=torch.contiguous_format).contiguous()

    with (
        patch.object(DeferredGradients, "product", product),
        patch.object(kv_store, "copy_by_token", by_token),
    ):
        yield


def lent_saved_tensors() -> Any:
    """Deferred weight gradients keep saved tensors that a store lends."""
    get = BlockStore.get
    return patch.object(BlockStore, "get", lambda store, key, *, owned=False: get(store, key))


def message_not_awaited() -> Any:
    """A received tensor is used before it is here, and nobody waits for what is sent."""
    return patch.object(pipeline_p2p.MessageInFlight, "wait", lambda self: self.tensor)


@contextmanager
def sent_memory_reused() -> Iterator[None]:
    """A tensor is written over while it is being sent."""
    send = pipeline_p2p.PipelineLinks.send

    def send_and_reuse(self: Any, tensor: torch.Tensor, *, receiver: int, what: str) -> None:
        send(self, tensor, receiver=receiver, what=what)
        tensor.mul_(1.5)

    with patch.object(pipeline_p2p.PipelineLinks, "send", send_and_reuse):
        yield


def buckets_not_awaited() -> Any:
    """Gradients are taken out of a bucket before they are added up."""

    def _wait_for(self: Any, most: int) -> None:
        while len(self._under_way) > most:
            _, finish = self._under_way.popleft()
            finish()

    return patch.object(RowBuckets, "_wait_for", _wait_for)


def gathers_not_awaited() -> Any:
    """Weights of ZeRO-3 are used before they are here."""
    gather = RowMessage.gather

    def gather_unwatched(self: Any, shard: Any) -> Any:
        gather(self, shard)
        self.work, self._work = self._work, _Nothing()
        return self

    return patch.object(RowMessage, "gather", gather_unwatched)


def reductions_not_awaited() -> Any:
    """Gradients are added to their shards before they are added up over the ranks."""
    reduce = RowMessage.reduce

    def reduce_unwatched(self: Any) -> None:
        reduce(self)
        self._work = _Nothing()

    return patch.object(RowMessage, "reduce", reduce_unwatched)


def reductions_reused() -> Any:
    """Whole gradients are written over while they are being reduced."""
    reduce = RowMessage.reduce

    def reduce_and_reuse(self: Any) -> None:
        reduce(self)
        self.whole.mul_(1.5)

    return patch.object(RowMessage, "reduce", reduce_and_reuse)


def last_reduction_skipped() -> Any:
    """What a stage formed last in a step never reaches its shard."""

    def wait_reductions(self: Any) -> None:
        self._under_way.clear()

    return patch.object(ShardedGradients, "wait_reductions", wait_reductions)


class _Nothing:
    def wait(self) -> None:
        pass


@contextmanager
def positions_from_subsequence() -> Iterator[None]:
    """Every subsequence counts positions from its own start, as if it were a document."""
    units_of = engine.units_of

    def shifted(*arguments: Any, **options: Any) -> Any:
        units = units_of(*arguments, **options)
        return {
            key: replace(
                unit,
                positions_C=(unit.positions_C - unit.span.start).clamp_min(0),
                span_positions_C=(unit.span_positions_C - unit.span.start).clamp_min(0),
            )
            for key, unit in units.items()
        }

    with patch.object(engine, "units_of", shifted):
        yield


@contextmanager
def prefix_without_dk() -> Iterator[None]:
    """What a subsequence adds to the key gradients of earlier ones is lost."""
    backward = prefix_attention.attention_backward

    def forgetful(call: Any, *rest: Any, dk_TKD: Any, **options: Any) -> Any:
        before = dk_TKD.clone()
        dq = backward(call, *rest, dk_TKD=dk_TKD, **options)
        start = call.num_keys - call.num_queries
        dk_TKD[:start] = before[:start]
        return dq

    with patch.object(prefix_attention, "attention_backward", forgetful):
        yield


def documents_not_isolated() -> Any:
    """Recomputed attention and its backward look across the starts of documents."""
    return patch.object(prefix_attention.PrefixAttention, "_documents", lambda self, end: (0,))


def norm_of_own_gradients() -> Any:
    """Every rank clips by the norm of its own gradients."""
    from sppo.optim.gradient_norm import global_norm

    return patch.object(
        ShardedState, "norm", lambda self, gradients, peers: global_norm(self.owned(gradients))
    )


@contextmanager
def tied_gradients_apart() -> Iterator[None]:
    """The first and the last stage keep their own parts of a tied embedding's gradient."""

    def finish(self: Any, gradients: Any) -> None:
        self._end_reductions()

    with patch.object(ShardedState, "finish", finish):
        yield


@contextmanager
def resumed_without_step() -> Iterator[None]:
    """An optimizer that goes on from a checkpoint corrects its moments as in the first step."""
    load_state = AdamW.load_state

    def forgetful(self: Any, state: Any) -> None:
        load_state(self, state)
        for update in self._updates:
            update.set_steps(0)

    with patch.object(AdamW, "load_state", forgetful):
        yield


def weights_not_gathered() -> Any:
    """After a step every rank goes on with the rows that it updated itself, others being old."""
    return patch.object(ShardedState, "gather", lambda self, weights: None)


@contextmanager
def window_one_short() -> Iterator[None]:
    """A sliding window is one token shorter in a backward than in its forward."""
    backward = prefix_attention.attention_backward

    def shorter(call: Any, *rest: Any, **options: Any) -> Any:
        window = call.window and max(1, call.window - 1)
        return backward(replace(call, window=window), *rest, **options)

    with patch.object(prefix_attention, "attention_backward", shorter):
        yield


@contextmanager
def window_gradients_one_row_off() -> Iterator[None]:
    """Gradients of keys that later units see are one row from their place."""
    keep = kv_store.StoredKV.keep

    def one_off(self: Any, *sums: torch.Tensor) -> None:
        keep(self, *sums)
        self._entry.gradient_rows = max(0, self._entry.gradient_rows - 1)

    with patch.object(kv_store.StoredKV, "keep", one_off):
        yield


@contextmanager
def window_keys_one_row_off() -> Iterator[None]:
    """Keys that later units see are kept one row from their place."""
    write = partial_kv.PartialKV.write

    def one_off(self: Any, *keys: torch.Tensor) -> None:
        write(self, *keys)
        rows, end = self._entry.rows_before, self.span.end
        rows[end] -= rows[end] > min(end, self.window - 1)

    with patch.object(partial_kv.PartialKV, "write", one_off):
        yield


@contextmanager
def window_off_by_one() -> Iterator[None]:
    """A query of a sliding window sees one key more, in all passes alike."""
    call = prefix_attention.PrefixAttention._call

    def wider(self: Any, *arguments: Any) -> Any:
        window = self.window and self.window + 1
        return call(replace(self, window=window), *arguments)

    with patch.object(prefix_attention.PrefixAttention, "_call", wider):
        yield


@contextmanager
def sink_gradient_missing() -> Iterator[None]:
    """Sinks take part in attention and get no gradient from it."""
    gradient = attention_mixer.sink_gradient

    def nothing(*arguments: Any) -> torch.Tensor:
        return torch.zeros_like(gradient(*arguments))

    with patch.object(attention_mixer, "sink_gradient", nothing):
        yield


@contextmanager
def norm_offset_forgotten() -> Iterator[None]:
    """The backward of a norm takes its weight for the factor, and not for an offset from one."""
    backward = elementwise.norm_backward

    def plain(*arguments: Any, offset: bool = False, **options: Any) -> Any:
        return backward(*arguments, **options)

    with patch.object(elementwise, "norm_backward", plain):
        yield


@contextmanager
def one_rotation() -> Iterator[None]:
    """Layers with a window rotate with the base of the others."""
    table = rope.rotary_table

    def of_full_layers(model: Any, rotation: Any, *arguments: Any, **options: Any) -> Any:
        full = Rotation(model.rope_theta, model.rope_scaling is not None)
        return table(model, full, *arguments, **options)

    with patch.object(rope, "rotary_table", of_full_layers):
        yield


@contextmanager
def residual_scale_forgotten() -> Iterator[None]:
    """The gradient of what a layer adds to the residual stream leaves the scale out."""
    backward = Residual.term_backward

    def unscaled(self: Residual, *arguments: Any) -> Any:
        plain = self.model.model_copy(update={"residual_scale": 1.0})
        return backward(replace(self, model=plain), *arguments)

    with patch.object(Residual, "term_backward", unscaled):
        yield


@contextmanager
def smoothing_forgotten() -> Iterator[None]:
    """The gradient of the loss leaves label smoothing out."""
    gradient = stage_providers.linear_cross_entropy_with_gradient

    def plain(*arguments: Any, terms: Any, **options: Any) -> Any:
        return gradient(*arguments, terms=replace(terms, label_smoothing=0.0), **options)

    with patch.object(stage_providers, "linear_cross_entropy_with_gradient", plain):
        yield


@contextmanager
def scale_forgotten() -> Iterator[None]:
    """The gradient of an adapter's inner product is that of an adapter with the scale one."""
    backward = Projection.backward

    def unscaled(self: Projection, dy_CO: torch.Tensor) -> Any:
        plain = replace(self, scale=1.0) if self.has_adapter else self
        return replace(backward(plain, dy_CO), projection=self)

    with patch.object(Projection, "backward", unscaled):
        yield


@contextmanager
def recomputed_without_adapters() -> Iterator[None]:
    """What a backward computes again of a forward leaves the adapters out."""
    found = {
        name: getattr(Layer, name)
        for name in ("recompute_missing_rows", "recompute_kv", "recompute_output")
    }

    def of_base(name: str) -> Callable[..., Any]:
        def recompute(self: Layer, saved: Any) -> Any:
            base = {name: tensor for name, tensor in self.weights.items() if not is_factor(name)}
            mixer = replace(self.mixer, weights=base)
            return found[name](replace(self, weights=base, mixer=mixer), saved)

        return recompute

    with patch.multiple(Layer, **{name: of_base(name) for name in found}):
        yield


@contextmanager
def whole_factors_not_summed() -> Iterator[None]:
    """Ranks that shard a weight keep their own gradients of the factor that they have whole."""
    replica_group = WeightSharding.replica_group

    def as_of_weights(self: WeightSharding, name: str) -> str:
        kind = replica_group(self, name)
        return "block" if is_factor(name) and kind == "stage" else kind

    with patch.object(WeightSharding, "replica_group", as_of_weights):
        yield


@contextmanager
def frozen_weights_decayed() -> Iterator[None]:
    """A step takes the weight decay from frozen weights, too."""
    gather = ShardedState.gather

    def decayed(self: ShardedState, weights: Any) -> None:
        for key in weights.keys() - self.gradient_shapes.keys():
            weights[key].mul_(0.99)
        gather(self, weights)

    with patch.object(ShardedState, "gather", decayed):
        yield


@contextmanager
def experts_chosen_again() -> Iterator[None]:
    """Backward chooses experts again, of logits that are rounded to bf16."""
    backward = ExpertMlp.backward

    def rerouted(self: Any, dy: Any, n2: Any, inputs: Any, gradients: Any) -> Any:
        logits_CX = router_logits(n2, self.weights).bfloat16().float()
        inputs["chosen"] = choose(logits_CX, self.model.experts, self.terms.choice_bias_X)
        return backward(self, dy, n2, inputs, gradients)

    with patch.object(ExpertMlp, "backward", rerouted):
        yield


@contextmanager
def loads_counted_twice() -> Iterator[None]:
    """Recomputation counts the experts that tokens chose once more."""
    complete = ExpertLoads.complete

    def doubled(self: Any, unit: Any, layers: Any) -> None:
        for loads_X in self._of_sequence.values():
            loads_X.mul_(2)
        complete(self, unit, layers)

    with patch.object(ExpertLoads, "complete", doubled):
        yield


def loads_of_own_tokens() -> Any:
    """The balance loss of a sequence takes the loads of this rank's shard of its tokens."""
    return patch.object(UlyssesAllToAll, "add_up_", lambda self, x: None)


def _sees_several_units(case: Case) -> bool:
    """Return whether queries of layers with a window see keys of an earlier unit."""
    return (case.model.window or 0) > 1 and any(len(leg.cuts) > 2 for leg in case.legs)


def _lends_gradients(case: Case) -> bool:
    """Whether dV of a sequence may be read after the next sequence has its buffer."""
    return case.dtype != "bf16" and any(
        "zb_h1" in leg.schedule and leg.pp > 1 and len(leg.cuts) == 2 and leg.replica_sequences > 1
        for leg in case.legs
    )


def _lends_saved_tensors(case: Case) -> bool:
    """Whether deferred weight gradients have operands in the slots of a store that returns them."""
    return any(
        "zb_h1" in leg.schedule
        and leg.pp > 1
        and leg.ratio == 1.0
        and (leg.last_too or len(leg.cuts) > 2)
        for leg in case.legs
    )


def _reduces(case: Case, *, after_each_use: bool) -> bool:
    """Whether ranks add gradients up, after each use (ZeRO-2 and 3) or once per step."""
    return any((leg.zero >= 2) == after_each_use and leg.dp * leg.sp > 1 for leg in case.legs)


def _has(case: Case, key: str) -> bool:
    """Return whether the model has a property that is null or false in most models."""
    return bool(getattr(case.model.config(), key))


def _has_adapter(case: Case, *, scaled: bool = False) -> bool:
    adapter = case.trainable.adapter
    return adapter is not None and (adapter.scale != 1.0 or not scaled)


def _recomputes(case: Case) -> bool:
    """Whether layers compute rows, outputs, or K and V again before their backward."""
    return any(
        leg.input_every > 1 or leg.kv_recomputed or (leg.policy == "rebuilt" and leg.ratio < 1)
        for leg in case.legs
    )


def _shards_loads(case: Case) -> bool:
    """Return whether the tokens of a sequence whose experts are balanced are on several ranks."""
    return case.router_losses[0] > 0 and any(leg.sp > 1 for leg in case.legs)


def _shards_weights(case: Case) -> bool:
    return any(leg.sequence_parallel == "megatron" for leg in case.legs)


MUTATIONS: dict[str, tuple[Mutation, Callable[[Case], bool]]] = {
    function.__name__: (function, may_show)
    for function, may_show in (
        (lent_operands, _lends_gradients),
        (lent_saved_tensors, _lends_saved_tensors),
        (message_not_awaited, lambda case: any(leg.pp > 1 for leg in case.legs)),
        (sent_memory_reused, lambda case: any(leg.pp > 1 for leg in case.legs)),
        (buckets_not_awaited, lambda case: _reduces(case, after_each_use=False)),
        (reductions_not_awaited, lambda case: _reduces(case, after_each_use=True)),
        (reductions_reused, lambda case: _reduces(case, after_each_use=True)),
        (last_reduction_skipped, lambda case: _reduces(case, after_each_use=True)),
        (gathers_not_awaited, lambda case: any(leg.zero == 3 for leg in case.legs)),
        (experts_chosen_again, lambda case: case.model.experts != "" and case.dtype == "fp32"),
        (loads_counted_twice, lambda case: case.router_losses[0] > 0),
        (loads_of_own_tokens, _shards_loads),
        (positions_from_subsequence, lambda case: any(len(leg.cuts) > 2 for leg in case.legs)),
        (prefix_without_dk, lambda case: any(len(leg.cuts) > 2 for leg in case.legs)),
        (documents_not_isolated, lambda case: case.documents > 1 or case.samples is not None),
        (norm_of_own_gradients, lambda case: case.num_ranks > 1),
        (tied_gradients_apart, lambda case: case.model.tied and case.num_ranks > 1),
        (resumed_without_step, lambda case: len(case.legs) > 1),
        (weights_not_gathered, lambda case: case.num_ranks > 1),
        (window_one_short, lambda case: case.model.window is not None),
        (window_gradients_one_row_off, _sees_several_units),
        (
            window_keys_one_row_off,
            lambda case: (
                _sees_several_units(case) and any(leg.recomputes_windows for leg in case.legs)
            ),
        ),
        (window_off_by_one, lambda case: _has(case, "sliding_window")),
        (sink_gradient_missing, lambda case: _has(case, "attention_sinks")),
        (norm_offset_forgotten, lambda case: _has(case, "norm_offset")),
        (one_rotation, lambda case: _has(case, "sliding_rope_theta")),
        (residual_scale_forgotten, lambda case: case.model.config().residual_scale != 1),
        (smoothing_forgotten, lambda case: case.label_smoothing > 0),
        (scale_forgotten, lambda case: _has_adapter(case, scaled=True)),
        (recomputed_without_adapters, lambda case: _has_adapter(case) and _recomputes(case)),
        (whole_factors_not_summed, lambda case: _has_adapter(case) and _shards_weights(case)),
        (frozen_weights_decayed, lambda case: not case.trainable.is_everything),
    )
}
"""By name: the defect, and which cases can show it at all."""
