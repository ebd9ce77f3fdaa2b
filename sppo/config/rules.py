"""Rules about more than one key, or about more than the type of a key.

Each rule reads a run whose sections were parsed. If the run breaks it, the rule yields the path of
a key and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import get_args

from sppo.config.model_rules import MODEL_RULES, Broken
from sppo.config.optimizer import steps_of
from sppo.config.problems import MISSING, Problem
from sppo.config.run import WITH_VIRTUAL_STAGES, RunConfig
from sppo.config.validation import Measure
from sppo.quoting import quoted

_AWAY = ("host", "disk")


def broken_rules(run: RunConfig) -> Iterator[Problem]:
    """Yield the problem of every rule that `run` breaks."""
    for rule in RULES:
        for path, text in rule(run):
            value = attrgetter(path)(run)
            written = quoted(list(value)) if isinstance(value, tuple) else str(value)
            written = written.lower() if isinstance(value, bool) else written
            yield Problem(path, MISSING if value is None else written, text)


def _data_is_named_once(run: RunConfig) -> Broken:
    """Training tokens are named by ``data.tokens`` or ``data.sources``, not by both.

    ``data.weights`` is of ``data.sources``.
    """
    if run.data.tokens is not None and run.data.sources is not None:
        rule = "data.sources names the training tokens, too; leave one of the two keys out"
        yield "data.tokens", rule
    elif run.data.sources is None and run.data.weights != "tokens":
        rule = "is the unit of the weights of data.sources, and there are none; leave it out"
        yield "data.weights", rule


def _sequence_suits_samples(run: RunConfig) -> Broken:
    """``sequence.longer`` other than cut needs documents, and ``sequence.boundaries`` a stream.

    Sequences of a stream have one length; documents have different lengths.
    """
    if run.data.samples == "stream" and run.sequence.longer != "cut":
        yield (
            "sequence.longer",
            "a stream is cut into sequences of one length; write data.samples=documents, or leave "
            "it out",
        )
    if run.data.samples == "documents" and run.sequence.boundaries is not None:
        yield (
            "sequence.boundaries",
            "data.samples=documents has samples of many lengths, which every step cuts anew; leave "
            "one of the two keys out",
        )


def _step_suits_samples(run: RunConfig) -> Broken:
    """The size of a step is given in sequences of a stream, or in samples or tokens of documents.

    With ``data.samples=documents``, exactly one of ``train.samples_per_step`` and
    ``train.tokens_per_step`` is given.
    """
    samples, tokens = run.train.samples_per_step, run.train.tokens_per_step
    if run.data.samples == "stream":
        for key in ("train.samples_per_step", "train.tokens_per_step"):
            if attrgetter(key)(run) is not None:
                yield (
                    key,
                    "counts samples, and data.samples=stream has none; write "
                    "data.samples=documents, or train.sequences_per_step instead",
                )
        return
    if run.train.sequences_per_step != 1:
        yield (
            "train.sequences_per_step",
            "counts sequences of a stream; with data.samples=documents leave it out, or write 1 "
            "over what a run file has, and write train.samples_per_step or train.tokens_per_step",
        )
    if samples is None and tokens is None:
        rule = "data.samples=documents needs it or train.tokens_per_step; write one of the two"
        yield "train.samples_per_step", rule
    elif samples is not None and tokens is not None:
        yield (
            "train.tokens_per_step",
            f"train.samples_per_step={samples} says how large a step is, too; leave one of the two "
            "keys out",
        )


def _length_is_given_once(run: RunConfig) -> Broken:
    """``train.epochs`` and ``train.steps`` exclude each other, and epochs need ``data.tokens``.

    Each source of ``data.sources`` has epochs of its own.
    """
    if run.train.epochs is None:
        return
    if run.data.sources is not None:
        yield (
            "train.epochs",
            "every source of data.sources has epochs of its own; write train.steps, for which "
            "sppo data mix shows the epochs of each",
        )
    elif "steps" in run.train.model_fields_set:
        yield (
            "train.epochs",
            f"train.steps={run.train.steps} gives the length, too; leave one of the two keys out, "
            "or write train.epochs=null",
        )


def _replicas_get_samples(run: RunConfig) -> Broken:
    """With documents, every data-parallel replica gets at least one sample in every step.

    ``train.samples_per_step`` is at least the number of replicas, and ``train.tokens_per_step`` at
    least that number times ``sequence.length``.
    """
    if run.data.samples == "stream":
        return
    replicas, length = run.parallel.data_parallel_degree, run.sequence.length
    samples, tokens = run.train.samples_per_step, run.train.tokens_per_step
    if samples is not None and samples < replicas:
        yield (
            "train.samples_per_step",
            f"fewer than the {replicas} replicas of parallel.data_parallel_degree, each of which "
            f"trains on a sample of every step; raise it to {replicas}",
        )
    if tokens is not None and tokens < length * replicas:
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        yield (
            "train.tokens_per_step",
            f"must hold a sample of sequence.length = {length} tokens{each}; raise it to at least "
            f"{length * replicas}, or shorten the samples",
        )


def _replicas_share_no_step(run: RunConfig) -> Broken:
    """With documents and several replicas, ``parallel.zero`` is at most 1.

    The replicas run different programs, and synchronize only at the end of a step.
    """
    replicas = run.parallel.data_parallel_degree
    if run.data.samples == "documents" and run.parallel.zero >= 2 and replicas > 1:
        yield (
            "parallel.zero",
            f"shards gradients over {replicas} data-parallel replicas, which meet in every action; "
            "with data.samples=documents each replica runs a program of its own, so they would "
            "wait for each other; write parallel.zero=1, or parallel.data_parallel_degree=1",
        )


def _cuts_tile(run: RunConfig) -> Broken:
    """Every subsequence has a token; explicit cuts ascend from 0 to ``sequence.length``."""
    cuts, length = run.sequence.boundaries, run.sequence.length
    count = run.sequence.num_subsequences
    if cuts is None:
        if count != "auto" and count > length:
            rule = f"more than the {length} tokens of a sequence; every subsequence needs one"
            yield "sequence.num_subsequences", rule
        return
    ascending = all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != length or not ascending:
        example = f"[0, {length // 2}, {length}]"
        rule = f"must rise from 0 to sequence.length = {length}, e.g. {example}"
        yield "sequence.boundaries", rule
    elif count not in ("auto", len(cuts) - 1):
        rule = f"boundaries cut {len(cuts) - 1} subsequences; leave one of the two keys out"
        yield "sequence.num_subsequences", rule


def _multiplexing_agrees(run: RunConfig) -> Broken:
    """``parallel.multiplexed=on`` needs schedule auto or ``sppo_msp``; off excludes the latter."""
    asked, schedule = run.parallel.multiplexed, run.parallel.schedule
    if asked == "on" and schedule not in ("auto", "sppo_msp"):
        rule = f"parallel.schedule={schedule} shards no units; write auto, or leave one out"
        yield "parallel.multiplexed", rule
    elif asked == "off" and schedule == "sppo_msp":
        rule = "parallel.schedule=sppo_msp is multiplexed; write another schedule, or auto"
        yield "parallel.multiplexed", rule


def _virtual_stages_are_served(run: RunConfig) -> Broken:
    """Several virtual stages on a rank need a schedule that allows them."""
    virtual, schedule = run.parallel.virtual_stages, run.parallel.schedule
    if virtual not in ("auto", 1) and schedule not in ("auto", *WITH_VIRTUAL_STAGES):
        yield (
            "parallel.virtual_stages",
            f"parallel.schedule={schedule} holds one stage on a rank; write auto or one of "
            f"{', '.join(WITH_VIRTUAL_STAGES)}, or leave parallel.virtual_stages out",
        )


def _layers_suffice(run: RunConfig) -> Broken:
    """Every virtual stage has at least one layer."""
    virtual, ranks = run.parallel.virtual_stages, run.parallel.pipeline_parallel_degree
    layers = run.model.num_layers
    if virtual not in ("auto", 1) and ranks * int(virtual) > layers:
        on_ranks = "" if ranks == 1 else f" on each of {ranks} pipeline ranks"
        yield (
            "parallel.virtual_stages",
            f"so many stages{on_ranks} need a layer each, and there are {layers}; lower "
            f"it to at most {max(1, layers // ranks)}",
        )


def _kv_agrees(run: RunConfig) -> Broken:
    """K and V are offloaded or recomputed only in the looped order with several virtual stages.

    Other orders use K and V of all layers of a rank at a time. With multiplexed sequence
    partitioning, K and V stay on the device. Layers with a sliding window recompute theirs in every
    order.
    """
    parallel, asked = run.parallel, run.activations.kv
    if asked not in ("offload", "recompute"):
        return
    in_windows = asked == "recompute" and run.model.has_windows
    if parallel.virtual_stages == 1 and not in_windows:
        yield (
            "activations.kv",
            "parallel.virtual_stages=1 uses K and V of all layers at once; raise it, or leave one "
            "of the two keys out",
        )
    elif parallel.schedule not in ("auto", "looped_bfs") and not in_windows:
        yield (
            "activations.kv",
            f"parallel.schedule={parallel.schedule} uses K and V of several stages at once; write "
            "looped_bfs or auto, or leave activations.kv out",
        )
    elif parallel.multiplexed == "on":
        yield (
            "activations.kv",
            "ranks that share units (parallel.multiplexed=on) have K and V on the device; leave "
            "one of the two keys out",
        )


def _tiers_agree(run: RunConfig) -> Broken:
    """Gradients, or weights that all train, on host or disk need the optimizer on the same tier.

    The optimizer runs on the tier of its state. Frozen weights leave the device without it.
    """
    state, steps_at = run.state, run.state.optimizer
    freezes = run.adapter is not None or run.train.only is not None
    for key, tier in _away(run):
        if freezes and key == "state.weights" and steps_at == "device":
            continue
        if steps_at not in ("auto", tier):
            yield (
                key,
                f"the optimizer steps where its state is, and that is {steps_at}: write "
                f"state.optimizer={tier} too, or leave one of the two keys out",
            )
    if len({tier for _, tier in _away(run)}) > 1:
        rule = f"state.gradients={state.gradients}: what leaves the device goes to one tier"
        yield "state.weights", rule


def _stages_can_leave(run: RunConfig) -> Broken:
    """Weights or gradients on host or disk need several virtual stages on each rank.

    They leave the device one stage at a time. With multiplexed sequence partitioning, weights and
    gradients stay on the device.
    """
    for key, _ in _away(run):
        if run.parallel.virtual_stages == 1:
            yield (
                key,
                "leaves the device stage by stage, and with parallel.virtual_stages=1 a rank has "
                "one; raise it, or leave one of the two keys out",
            )
        elif run.parallel.multiplexed == "on" or run.parallel.schedule == "sppo_msp":
            yield (
                key,
                "ranks that share units (multiplexed sequence partitioning) have weights and "
                "gradients on the device; leave one of the two keys out",
            )


def _away(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of weights and gradients that are on host or disk, and their tiers."""
    tiers = {"state.weights": run.state.weights, "state.gradients": run.state.gradients}
    yield from ((key, tier) for key, tier in tiers.items() if tier in _AWAY)


def _disk_is_named(run: RunConfig) -> Broken:
    """A disk tier needs the directory ``activations.disk``."""
    for key in ("state.weights", "state.gradients", "state.optimizer"):
        if attrgetter(key)(run) == "disk" and run.activations.disk is None:
            yield key, "in which directory? write activations.disk=DIR, on a fast local disk"


def _decay_suits_schedule(run: RunConfig) -> Broken:
    """``optimizer.decay_steps`` is required for wsd, and it and ``decay`` belong to wsd only.

    Warm-up and decay together are at most as long as the schedule.
    """
    optimizer = run.optimizer
    if optimizer.schedule != "wsd":
        for key in ("optimizer.decay_steps", "optimizer.decay"):
            if attrgetter(key)(run) is not None:
                yield (
                    key,
                    f"is of schedule wsd, and optimizer.schedule={optimizer.schedule} decays from "
                    "the end of warm-up on; write optimizer.schedule=wsd, or leave it out",
                )
        return
    if optimizer.decay_steps is None:
        rule = "optimizer.schedule=wsd needs it; write a number of steps, or a share such as 20%"
        yield "optimizer.decay_steps", rule
        return
    if optimizer.schedule_steps is None and run.train.epochs is not None:
        return  # the rule is checked again once the number of steps is known
    total = optimizer.schedule_steps or run.train.steps
    warmup, decay = (
        steps_of(value, of=total) for value in (optimizer.warmup_steps, optimizer.decay_steps)
    )
    if warmup + decay > total:
        whose = "train.steps" if optimizer.schedule_steps is None else "optimizer.schedule_steps"
        yield (
            "optimizer.decay_steps",
            f"{decay} steps after {warmup} of warm-up are more than {whose}={total}; lower it to "
            f"at most {max(0, total - warmup)}, or raise {whose}",
        )


def _validation_has_sets(run: RunConfig) -> Broken:
    """A validation has a set, and watches the loss, accuracy or exact matches of one of them."""
    if run.validation is None:
        return
    sets = run.evaluated_sets
    if not sets:
        yield (
            "validation.sets",
            "there is nothing to validate on; write sets such as {held_out: {tokens: DIR}}, or "
            "data.eval_tokens=DIR",
        )
        return
    name, measure = run.validation.watched(next(iter(sets)))
    if name not in sets:
        yield "validation.watch", f"no such set; sets: {', '.join(sets)}"
    elif measure not in get_args(Measure):
        yield (
            "validation.watch",
            f"a set has {', '.join(get_args(Measure))}; write one of them behind {name}.",
        )
    elif measure == "exact" and (sets[name].samples or run.data.samples) != "documents":
        yield (
            "validation.watch",
            f"exact counts documents, and {name} is a stream; write samples: documents into it, or "
            f"watch {name}.accuracy",
        )


RULES = (
    _data_is_named_once,
    *MODEL_RULES,
    _cuts_tile,
    _multiplexing_agrees,
    _virtual_stages_are_served,
    _layers_suffice,
    _kv_agrees,
    _tiers_agree,
    _stages_can_leave,
    _disk_is_named,
    _sequence_suits_samples,
    _step_suits_samples,
    _length_is_given_once,
    _replicas_share_no_step,
    _replicas_get_samples,
    _validation_has_sets,
    _decay_suits_schedule,
)
