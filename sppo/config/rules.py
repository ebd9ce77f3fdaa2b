"""Rules about more than one key, or about more than the type of a key.

Each rule reads a run whose sections were parsed, and yields a problem if the run breaks it.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.config.huggingface_families import FAMILIES
from sppo.config.problems import MISSING, Problem
from sppo.config.run import WITH_VIRTUAL_STAGES, RunConfig
from sppo.quoting import quoted


def broken_rules(run: RunConfig) -> Iterator[Problem]:
    """Yield the problem of every rule that `run` breaks."""
    for rule in _RULES:
        yield from rule(run)


def _sequence_suits_samples(run: RunConfig) -> Iterator[Problem]:
    """``sequence.longer`` other than cut needs documents, and ``sequence.boundaries`` a stream.

    Sequences of a stream have one length; documents have different lengths.
    """
    sequence = run.sequence
    if run.data.samples == "stream" and sequence.longer != "cut":
        rule = (
            "a stream is cut into sequences of one length; write data.samples=documents, or leave "
            "it out"
        )
        yield Problem("sequence.longer", sequence.longer, rule)
    if run.data.samples == "documents" and sequence.boundaries is not None:
        rule = (
            "data.samples=documents has samples of many lengths, which every step cuts anew; leave "
            "one of the two keys out"
        )
        yield Problem("sequence.boundaries", quoted(list(sequence.boundaries)), rule)


def _step_suits_samples(run: RunConfig) -> Iterator[Problem]:
    """The size of a step is given in sequences of a stream, or in samples or tokens of documents.

    With ``data.samples=documents``, exactly one of ``train.samples_per_step`` and
    ``train.tokens_per_step`` is given.
    """
    train = run.train
    samples, tokens = train.samples_per_step, train.tokens_per_step
    if run.data.samples == "stream":
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


def _replicas_get_samples(run: RunConfig) -> Iterator[Problem]:
    """With documents, every data-parallel replica gets at least one sample in every step.

    ``train.samples_per_step`` is at least the number of replicas, and ``train.tokens_per_step`` at
    least that number times ``sequence.length``.
    """
    if run.data.samples == "stream":
        return
    replicas = run.parallel.data_parallel_degree
    samples, tokens = run.train.samples_per_step, run.train.tokens_per_step
    if samples is not None and samples < replicas:
        rule = (
            f"fewer than the {replicas} replicas of parallel.data_parallel_degree, each of which "
            f"trains on a sample of every step; raise it to {replicas}"
        )
        yield Problem("train.samples_per_step", str(samples), rule)
    least = run.sequence.length * replicas
    if tokens is not None and tokens < least:
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        rule = (
            f"must hold a sample of sequence.length = {run.sequence.length} tokens{each}; raise it "
            f"to at least {least}, or shorten the samples"
        )
        yield Problem("train.tokens_per_step", str(tokens), rule)


def _replicas_share_no_step(run: RunConfig) -> Iterator[Problem]:
    """With documents and several replicas, ``parallel.zero`` is at most 1.

    The replicas run different programs, and synchronize only at the end of a step.
    """
    zero, replicas = run.parallel.zero, run.parallel.data_parallel_degree
    if run.data.samples == "documents" and zero >= 2 and replicas > 1:
        rule = (
            f"shards gradients over {replicas} data-parallel replicas, which meet in every action; "
            "with data.samples=documents each replica runs a program of its own, so they would "
            "wait for each other; write parallel.zero=1, or parallel.data_parallel_degree=1"
        )
        yield Problem("parallel.zero", str(zero), rule)


def _cuts_tile(run: RunConfig) -> Iterator[Problem]:
    """Every subsequence has a token; explicit cuts ascend from 0 to ``sequence.length``."""
    cuts, length = run.sequence.boundaries, run.sequence.length
    count = run.sequence.num_subsequences
    if cuts is None:
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
    elif count not in ("auto", len(cuts) - 1):
        yield Problem(
            "sequence.num_subsequences",
            str(count),
            f"boundaries cut {len(cuts) - 1} subsequences; leave one of the two keys out",
        )


def _multiplexing_agrees(run: RunConfig) -> Iterator[Problem]:
    """``parallel.multiplexed=on`` needs schedule auto or ``sppo_msp``; off excludes the latter."""
    asked, schedule = run.parallel.multiplexed, run.parallel.schedule
    if asked == "on" and schedule not in ("auto", "sppo_msp"):
        rule = f"parallel.schedule={schedule} shards no units; write auto, or leave one out"
        yield Problem("parallel.multiplexed", "on", rule)
    elif asked == "off" and schedule == "sppo_msp":
        rule = "parallel.schedule=sppo_msp is multiplexed; write another schedule, or auto"
        yield Problem("parallel.multiplexed", "off", rule)


def _virtual_stages_are_served(run: RunConfig) -> Iterator[Problem]:
    """Several virtual stages on a rank need a schedule that allows them."""
    virtual, schedule = run.parallel.virtual_stages, run.parallel.schedule
    if virtual not in ("auto", 1) and schedule not in ("auto", *WITH_VIRTUAL_STAGES):
        rule = (
            f"parallel.schedule={schedule} holds one stage on a rank; write auto or one of "
            f"{', '.join(WITH_VIRTUAL_STAGES)}, or leave parallel.virtual_stages out"
        )
        yield Problem("parallel.virtual_stages", str(virtual), rule)


def _layers_suffice(run: RunConfig) -> Iterator[Problem]:
    """Every virtual stage has at least one layer."""
    virtual, ranks = run.parallel.virtual_stages, run.parallel.pipeline_parallel_degree
    layers = run.model.num_layers
    if virtual not in ("auto", 1) and ranks * int(virtual) > layers:
        on_ranks = "" if ranks == 1 else f" on each of {ranks} pipeline ranks"
        yield Problem(
            "parallel.virtual_stages",
            str(virtual),
            f"so many stages{on_ranks} need a layer each, and there are {layers}; lower "
            f"it to at most {max(1, layers // ranks)}",
        )


def _kv_agrees(run: RunConfig) -> Iterator[Problem]:
    """K and V are offloaded or recomputed only in the looped order with several virtual stages.

    Other orders use K and V of all layers of a rank at a time. With multiplexed sequence
    partitioning, K and V stay on the device.
    """
    parallel, asked = run.parallel, run.activations.kv
    if asked not in ("offload", "recompute"):
        return
    if parallel.virtual_stages == 1:
        rule = (
            "parallel.virtual_stages=1 uses K and V of all layers at once; raise it, or leave one "
            "of the two keys out"
        )
        yield Problem("activations.kv", asked, rule)
    elif parallel.schedule not in ("auto", "looped_bfs"):
        rule = (
            f"parallel.schedule={parallel.schedule} uses K and V of several stages at once; write "
            "looped_bfs or auto, or leave activations.kv out"
        )
        yield Problem("activations.kv", asked, rule)
    elif parallel.multiplexed == "on":
        rule = (
            "ranks that share units (parallel.multiplexed=on) have K and V on the device; leave "
            "one of the two keys out"
        )
        yield Problem("activations.kv", asked, rule)


def _tiers_agree(run: RunConfig) -> Iterator[Problem]:
    """Weights or gradients on host or disk need the optimizer on the same tier.

    The optimizer runs on the tier of its state. ``optimizer.offload`` stands for
    ``state.optimizer=host``.
    """
    state, steps_at = run.state, run.state.optimizer
    if run.optimizer.offload and steps_at in ("device", "disk"):
        rule = f"is state.optimizer=host, and that key says {steps_at}; leave one of the two out"
        yield Problem("optimizer.offload", "true", rule)
        return
    if run.optimizer.offload:
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


def _stages_can_leave(run: RunConfig) -> Iterator[Problem]:
    """Weights or gradients on host or disk need several virtual stages on each rank.

    They leave the device one stage at a time. With multiplexed sequence partitioning, weights and
    gradients stay on the device.
    """
    for part in ("weights", "gradients"):
        tier = getattr(run.state, part)
        if tier not in ("host", "disk"):
            continue
        if run.parallel.virtual_stages == 1:
            rule = (
                "leaves the device stage by stage, and with parallel.virtual_stages=1 a rank has "
                "one; raise it, or leave one of the two keys out"
            )
            yield Problem(f"state.{part}", tier, rule)
        elif run.parallel.multiplexed == "on" or run.parallel.schedule == "sppo_msp":
            rule = (
                "ranks that share units (multiplexed sequence partitioning) have weights and "
                "gradients on the device; leave one of the two keys out"
            )
            yield Problem(f"state.{part}", tier, rule)


def _disk_is_named(run: RunConfig) -> Iterator[Problem]:
    """A disk tier needs the directory ``activations.disk``."""
    for part in ("weights", "gradients", "optimizer"):
        if getattr(run.state, part) == "disk" and run.activations.disk is None:
            rule = "in which directory? write activations.disk=DIR, on a fast local disk"
            yield Problem(f"state.{part}", "disk", rule)


def _window_fits(run: RunConfig) -> Iterator[Problem]:
    """``model.sliding_window_first_layer`` is at most the number of layers."""
    first, layers = run.model.sliding_window_first_layer, run.model.num_layers
    if first > layers:
        rule = f"beyond the last of {layers} layers"
        yield Problem("model.sliding_window_first_layer", str(first), rule)


def _family_computes_it(run: RunConfig) -> Iterator[Problem]:
    """The family that ``model.family`` names computes exactly this model, so it can be exported."""
    family = run.model.family
    reasons = () if family is None else tuple(FAMILIES[family].misfits(run.model))
    if reasons:
        rule = f"does not compute this model: {'; '.join(reasons)}; use another family, or null"
        yield Problem("model.family", str(family), rule)


def _positions_reach(run: RunConfig) -> Iterator[Problem]:
    """A sequence is at most as long as the table of learned positions."""
    rows, length = run.model.max_positions, run.sequence.length
    if run.model.position == "learned" and rows is not None and length > rows:
        yield Problem(
            "sequence.length",
            str(length),
            f"longer than the {rows} learned positions; raise model.max_positions or shorten it",
        )


_RULES = (
    _window_fits,
    _family_computes_it,
    _positions_reach,
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
    _replicas_share_no_step,
    _replicas_get_samples,
)
