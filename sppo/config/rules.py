"""Rules about more than one key, or about more than the type of a key.

Each rule reads sections that were parsed and yields problems, so that an error in one section does
not hide errors in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sppo.config.huggingface_export import family_misfits
from sppo.config.model import ModelConfig
from sppo.config.problems import MISSING, Problem, nearest
from sppo.config.run import (
    ActivationsConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    SequenceConfig,
    StateConfig,
    TrainConfig,
)
from sppo.quoting import quoted

SCHEDULES = (
    "auto",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "seq1f1b",
    "interleaved_seq1f1b",
    "looped_bfs",
    "zb_h1",
    "seq_zb_h1",
    "sppo",
    "sppo_msp",
)
WITH_VIRTUAL_STAGES = ("interleaved_1f1b", "interleaved_seq1f1b", "looped_bfs", "sppo_msp")
"""Schedules that allow several stages on a rank."""


def check_sections(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of every broken rule among the parsed ``sections``, by section name."""
    for name, rule in _RULES:
        section = sections.get(name)
        if section is not None:
            yield from rule(section)
    model, sequence = sections.get("model"), sections.get("sequence")
    if model is not None and sequence is not None:
        yield from _positions_reach(model, sequence)
    parallel = sections.get("parallel")
    if model is not None and parallel is not None:
        yield from _layers_suffice(model, parallel)
    activations = sections.get("activations")
    if parallel is not None and activations is not None:
        yield from _kv_agrees(parallel, activations)
    state, optimizer = sections.get("state"), sections.get("optimizer")
    if state is not None and optimizer is not None:
        yield from _tiers_agree(state, optimizer)
    if state is not None and parallel is not None:
        yield from _stages_can_leave(state, parallel)
    if state is not None and activations is not None:
        yield from _disk_is_named(state, activations)
    yield from _check_samples(sections)


def _check_samples(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of every broken rule of ``data.samples`` among the parsed ``sections``."""
    data, sequence, train = (sections.get(name) for name in ("data", "sequence", "train"))
    if data is None:
        return
    if sequence is not None:
        yield from _sequence_suits_samples(data, sequence)
    if train is not None:
        yield from _step_suits_samples(data, train)
    parallel = sections.get("parallel")
    if data.samples == "stream" or parallel is None:
        return
    yield from _replicas_share_no_step(parallel)
    if sequence is not None and train is not None:
        yield from _replicas_get_samples(sequence, train, parallel)


def _sequence_suits_samples(data: DataConfig, sequence: SequenceConfig) -> Iterator[Problem]:
    """``sequence.longer`` other than cut needs documents, and ``sequence.boundaries`` a stream.

    Sequences of a stream have one length; documents have different lengths.
    """
    if data.samples == "stream" and sequence.longer != "cut":
        rule = (
            "a stream is cut into sequences of one length; write data.samples=documents, or leave "
            "it out"
        )
        yield Problem("sequence.longer", sequence.longer, rule)
    if data.samples == "documents" and sequence.boundaries is not None:
        rule = (
            "data.samples=documents has samples of many lengths, which every step cuts anew; leave "
            "one of the two keys out"
        )
        yield Problem("sequence.boundaries", quoted(list(sequence.boundaries)), rule)


def _step_suits_samples(data: DataConfig, train: TrainConfig) -> Iterator[Problem]:
    """The size of a step is given in sequences of a stream, or in samples or tokens of documents.

    With ``data.samples=documents``, exactly one of ``train.samples_per_step`` and
    ``train.tokens_per_step`` is given.
    """
    samples, tokens = train.samples_per_step, train.tokens_per_step
    if data.samples == "stream":
        for key, value in (("samples_per_step", samples), ("tokens_per_step", tokens)):
            if value is not None:
                rule = (
                    "counts samples, and data.samples=stream has none; write "
                    "data.samples=documents, or train.sequences_per_step instead"
                )
                yield Problem(f"train.{key}", str(value), rule)
        return
    if train.sequences_per_step != 1:
        rule = (
            "counts sequences of a stream; with data.samples=documents leave it out, or write 1 "
            "over what a run file has, and write train.samples_per_step or train.tokens_per_step"
        )
        yield Problem("train.sequences_per_step", str(train.sequences_per_step), rule)
    if samples is None and tokens is None:
        rule = "data.samples=documents needs it or train.tokens_per_step; write one of the two"
        yield Problem("train.samples_per_step", MISSING, rule)
    elif samples is not None and tokens is not None:
        rule = (
            f"train.samples_per_step={samples} says how large a step is, too; leave one of the two "
            "keys out"
        )
        yield Problem("train.tokens_per_step", str(tokens), rule)


def _replicas_get_samples(
    sequence: SequenceConfig, train: TrainConfig, parallel: ParallelConfig
) -> Iterator[Problem]:
    """With documents, every data-parallel replica gets at least one sample in every step.

    ``train.samples_per_step`` is at least the number of replicas, and ``train.tokens_per_step`` at
    least that number times ``sequence.length``.
    """
    replicas = parallel.data_parallel_degree
    samples, tokens = train.samples_per_step, train.tokens_per_step
    if samples is not None and samples < replicas:
        rule = (
            f"fewer than the {replicas} replicas of parallel.data_parallel_degree, each of which "
            f"trains on a sample of every step; raise it to {replicas}"
        )
        yield Problem("train.samples_per_step", str(samples), rule)
    least = sequence.length * replicas
    if tokens is not None and tokens < least:
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        rule = (
            f"must hold a sample of sequence.length = {sequence.length} tokens{each}; raise it to "
            f"at least {least}, or shorten the samples"
        )
        yield Problem("train.tokens_per_step", str(tokens), rule)


def _replicas_share_no_step(parallel: ParallelConfig) -> Iterator[Problem]:
    """With documents and several replicas, ``parallel.zero`` is at most 1.

    The replicas run different programs, and synchronize only at the end of a step.
    """
    replicas = parallel.data_parallel_degree
    if parallel.zero >= 2 and replicas > 1:
        rule = (
            f"shards gradients over {replicas} data-parallel replicas, which meet in every action; "
            "with data.samples=documents each replica runs a program of its own, so they would "
            "wait for each other; write parallel.zero=1, or parallel.data_parallel_degree=1"
        )
        yield Problem("parallel.zero", str(parallel.zero), rule)


def _cuts_tile(sequence: SequenceConfig) -> Iterator[Problem]:
    """Every subsequence has a token; explicit cuts ascend from 0 to ``sequence.length``."""
    cuts, length = sequence.boundaries, sequence.length
    if cuts is None:
        count = sequence.num_subsequences
        if count != "auto" and count > length:
            yield Problem(
                "sequence.num_subsequences",
                str(count),
                f"more than the {length} tokens of a sequence; every subsequence needs one",
            )
        return
    ascending = all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != length or not ascending:
        yield Problem(
            "sequence.boundaries",
            quoted(list(cuts)),
            f"must rise from 0 to sequence.length = {length}, e.g. [0, {length // 2}, {length}]",
        )
    elif sequence.num_subsequences not in ("auto", len(cuts) - 1):
        yield Problem(
            "sequence.num_subsequences",
            str(sequence.num_subsequences),
            f"boundaries cut {len(cuts) - 1} subsequences; leave one of the two keys out",
        )


def _schedule_exists(parallel: ParallelConfig) -> Iterator[Problem]:
    """``parallel.schedule`` is auto or the name of a schedule."""
    if parallel.schedule not in SCHEDULES:
        yield Problem(
            "parallel.schedule",
            quoted(parallel.schedule),
            f"not one of {', '.join(SCHEDULES)}.{nearest(parallel.schedule, SCHEDULES)}",
        )


def _multiplexing_agrees(parallel: ParallelConfig) -> Iterator[Problem]:
    """``parallel.multiplexed=on`` needs schedule auto or ``sppo_msp``; off excludes the latter."""
    asked, schedule = parallel.multiplexed, parallel.schedule
    if asked == "on" and schedule not in ("auto", "sppo_msp"):
        rule = f"parallel.schedule={schedule} shards no units; write auto, or leave one out"
        yield Problem("parallel.multiplexed", "on", rule)
    elif asked == "off" and schedule == "sppo_msp":
        rule = "parallel.schedule=sppo_msp is multiplexed; write another schedule, or auto"
        yield Problem("parallel.multiplexed", "off", rule)


def _virtual_stages_are_served(parallel: ParallelConfig) -> Iterator[Problem]:
    """Several virtual stages on a rank need a schedule that allows them."""
    virtual, schedule = parallel.virtual_stages, parallel.schedule
    if virtual in ("auto", 1):
        return
    if schedule not in ("auto", *WITH_VIRTUAL_STAGES) and schedule in SCHEDULES:
        rule = (
            f"parallel.schedule={schedule} holds one stage on a rank; write auto or one of "
            f"{', '.join(WITH_VIRTUAL_STAGES)}, or leave parallel.virtual_stages out"
        )
        yield Problem("parallel.virtual_stages", str(virtual), rule)


def _layers_suffice(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Every virtual stage has at least one layer."""
    virtual, ranks = parallel.virtual_stages, parallel.pipeline_parallel_degree
    if virtual not in ("auto", 1) and ranks * int(virtual) > model.num_layers:
        on_ranks = "" if ranks == 1 else f" on each of {ranks} pipeline ranks"
        yield Problem(
            "parallel.virtual_stages",
            str(virtual),
            f"so many stages{on_ranks} need a layer each, and there are {model.num_layers}; lower "
            f"it to at most {max(1, model.num_layers // ranks)}",
        )


def _kv_agrees(parallel: ParallelConfig, activations: ActivationsConfig) -> Iterator[Problem]:
    """K and V are offloaded or recomputed only in the looped order with several virtual stages.

    Other orders use K and V of all layers of a rank at a time. With multiplexed sequence
    partitioning, K and V stay on the device.
    """
    asked, schedule = activations.kv, parallel.schedule
    if asked not in ("offload", "recompute"):
        return
    if parallel.virtual_stages == 1:
        rule = (
            "parallel.virtual_stages=1 uses K and V of all layers at once; raise it, or leave one "
            "of the two keys out"
        )
        yield Problem("activations.kv", asked, rule)
    elif schedule not in ("auto", "looped_bfs") and schedule in SCHEDULES:
        rule = (
            f"parallel.schedule={schedule} uses K and V of several stages at once; write "
            "looped_bfs or auto, or leave activations.kv out"
        )
        yield Problem("activations.kv", asked, rule)
    elif parallel.multiplexed == "on":
        rule = (
            "ranks that share units (parallel.multiplexed=on) have K and V on the device; leave "
            "one of the two keys out"
        )
        yield Problem("activations.kv", asked, rule)


def _tiers_agree(state: StateConfig, optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Weights or gradients on host or disk need the optimizer on the same tier.

    The optimizer runs on the tier of its state. ``optimizer.offload`` stands for
    ``state.optimizer=host``.
    """
    steps_at = state.optimizer
    if optimizer.offload and steps_at in ("device", "disk"):
        rule = f"is state.optimizer=host, and that key says {steps_at}; leave one of the two out"
        yield Problem("optimizer.offload", "true", rule)
        return
    if optimizer.offload:
        steps_at = "host"
    for part in ("weights", "gradients"):
        tier = getattr(state, part)
        if tier in ("host", "disk") and steps_at not in ("auto", tier):
            rule = (
                f"the optimizer steps where its state is, and that is {steps_at}: write "
                f"state.optimizer={tier} too, or leave one of the two keys out"
            )
            yield Problem(f"state.{part}", tier, rule)
    away = {state.weights, state.gradients} & {"host", "disk"}
    if len(away) > 1:
        rule = f"state.gradients={state.gradients}: what leaves the device goes to one tier"
        yield Problem("state.weights", state.weights, rule)


def _stages_can_leave(state: StateConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Weights or gradients on host or disk need several virtual stages on each rank.

    They leave the device one stage at a time. With multiplexed sequence partitioning, weights and
    gradients stay on the device.
    """
    for part in ("weights", "gradients"):
        tier = getattr(state, part)
        if tier not in ("host", "disk"):
            continue
        if parallel.virtual_stages == 1:
            rule = (
                "leaves the device stage by stage, and with parallel.virtual_stages=1 a rank has "
                "one; raise it, or leave one of the two keys out"
            )
            yield Problem(f"state.{part}", tier, rule)
        elif parallel.multiplexed == "on" or parallel.schedule == "sppo_msp":
            rule = (
                "ranks that share units (multiplexed sequence partitioning) have weights and "
                "gradients on the device; leave one of the two keys out"
            )
            yield Problem(f"state.{part}", tier, rule)


def _disk_is_named(state: StateConfig, activations: ActivationsConfig) -> Iterator[Problem]:
    """A disk tier needs the directory ``activations.disk``."""
    for part in ("weights", "gradients", "optimizer"):
        if getattr(state, part) == "disk" and activations.disk is None:
            rule = "in which directory? write activations.disk=DIR, on a fast local disk"
            yield Problem(f"state.{part}", "disk", rule)


def _window_fits(model: ModelConfig) -> Iterator[Problem]:
    """``model.sliding_window_first_layer`` is at most the number of layers."""
    if model.sliding_window_first_layer > model.num_layers:
        yield Problem(
            "model.sliding_window_first_layer",
            str(model.sliding_window_first_layer),
            f"beyond the last of {model.num_layers} layers",
        )


def _family_computes_it(model: ModelConfig) -> Iterator[Problem]:
    """The family that ``model.family`` names computes exactly this model, so it can be exported."""
    reasons = family_misfits(model, model.family) if model.family is not None else ()
    if reasons:
        rule = f"does not compute this model: {'; '.join(reasons)}; use another family, or null"
        yield Problem("model.family", str(model.family), rule)


def _positions_reach(model: ModelConfig, sequence: SequenceConfig) -> Iterator[Problem]:
    """A sequence is at most as long as the table of learned positions."""
    rows = model.max_positions
    if model.position == "learned" and rows is not None and sequence.length > rows:
        yield Problem(
            "sequence.length",
            str(sequence.length),
            f"longer than the {rows} learned positions; raise model.max_positions or shorten it",
        )


_RULES = (
    ("model", _window_fits),
    ("model", _family_computes_it),
    ("sequence", _cuts_tile),
    ("parallel", _schedule_exists),
    ("parallel", _multiplexing_agrees),
    ("parallel", _virtual_stages_are_served),
)
