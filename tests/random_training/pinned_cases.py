"""Pinned cases: every value of every choice, beside others than a seed may draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sppo.cost.trainable import EVERYTHING, Adapter, Trainable
from tests.random_training.case import Case, Leg, Samples, Shape

MHA = Shape()
GQA = Shape("qwen3", kv_heads=2, head_size=6)
MQA = Shape("qwen2", kv_heads=1, window=5)
LATE_WINDOW = Shape("mistral", kv_heads=2, window=3, window_from=1, rope="llama3")
TIED = Shape("llama, biases", tied=True, rope="yarn")
GPT = Shape("gpt2", tied=True)
MIXED = Shape("layernorm, rotary, q/k-norm, gelu", kv_heads=2, rope="linear")
OLMO = Shape("olmo", kv_heads=2)
GEMMA = Shape("gemma", kv_heads=2, tied=True)
GPT_OSS = Shape("gpt-oss", kv_heads=2)
GRANITE = Shape("granite")
GLM = Shape("glm", kv_heads=1, head_size=6, rotary=0.7)
MODELS = {
    "mha": MHA,
    "gqa": GQA,
    "mqa": MQA,
    "late window": LATE_WINDOW,
    "tied": TIED,
    "gpt": GPT,
    "gpt, mqa": Shape("gpt2", kv_heads=1),
    "mixed": MIXED,
    "learned positions": Shape("learned positions, q/k-norm"),
}
POLICIES = ("retain", "keep_attention", "recompute")
ODD = Shape(
    "qwen3", 3, hidden=7, heads=6, kv_heads=3, head_size=2, mlp_size=5, vocab_size=2, norm_eps=1e-2
)

TWO = {"cuts": (0, 3, 5, 11, 17), "other_cuts": (0, 6, 9), "replica_sequences": 2}
THREE = {"cuts": (0, 3, 4, 11, 17), "other_cuts": (0, 6, 9), "replica_sequences": 3}
WHOLE = {"cuts": (0, 9), "other_cuts": (0, 5), "replica_sequences": 3}
LOOPED = {
    "schedule": "looped_bfs",
    "cuts": (0, 6, 9, 13, 16, 19),
    "other_cuts": (0, 4, 7, 9),
    "replica_sequences": 2,
}
"""Five subsequences, then three: no multiple of two or of four ranks."""
PIECES = (0, 9, 14, 21, 30)
"""Cuts of a sequence some of whose units are cut into pieces."""


def case(
    model: Shape, layers: int | None = None, *, trainable: Trainable = EVERYTHING, **leg: Any
) -> Case:
    """One leg in float64.

    Args:
        model: the shape.
        layers: other layers than the shape has.
        trainable: what trains.
        leg: what is not as usual; of an offloading one the disk is the tier.
    """
    model = model if layers is None else replace(model, layers=layers)
    if "ratio" in leg or "kv_offloaded" in leg:
        leg = {"tier": "disk", "policy": "kept", "lag": 1, **leg}
    legs = (Leg(debug=True, evaluates=True, **leg),)
    return Case(dtype="fp64", model=model, legs=legs, trainable=trainable)


def samples(
    model: Shape,
    layers: int | None = None,
    *,
    mixed: bool = False,
    pace: float | None = None,
    **leg: Any,
) -> Case:
    """Two steps of documents; those beyond 40 tokens are cut."""
    one = case(model, layers, steps=2, cuts=(0, 40), **leg)
    documents = (41, 2, 9, 95, 4, 31, 2, 26)
    how = Samples(documents, 40, samples_per_step=5, mixed=mixed, pace=pace)
    return replace(one, legs=(replace(one.legs[0], evaluates=False),), samples=how)


ONE_RANK = {
    **{
        name: case(model, policy=POLICIES[number % 3], **TWO)
        for number, (name, model) in enumerate(MODELS.items())
    },
    "odd sizes": case(ODD, policy="keep_attention", **THREE),
    "one token": replace(case(GQA, cuts=(0, 1)), ignored=0.0),
    **{
        f"one token at a time, {policy}": replace(
            case(GQA, policy=policy, cuts=tuple(range(30))), documents=3
        )
        for policy in POLICIES
    },
    # A diagonal above 1024 is halved, a band has three tiles of 512.
    "attention limits, recomputed": case(
        replace(LATE_WINDOW, window=150), policy="recompute", cuts=(0, 1100, 1101, 1300)
    ),
    "documents": replace(case(GQA, cuts=(0, 7, 15, 16, 30, 43)), documents=5),
    "documents in a window": replace(case(MQA, cuts=(0, 7, 15, 16, 30, 43)), documents=5),
    "documents, learned positions": replace(case(GPT, cuts=(0, 7, 15, 16, 30)), documents=5),
    "few labels": replace(case(MHA, **TWO), ignored=0.5),
    "sequences without labels": replace(case(GQA, **THREE), ignored=1.0),
    "loss terms": replace(case(MHA, cuts=(0, 7, 20, 29)), label_smoothing=0.2, z_loss=0.01),
    "loss terms, tied": replace(case(TIED, **TWO), label_smoothing=0.2, z_loss=0.01, documents=2),
    "stages of one rank": case(GQA, 5, virtual=4, policy="recompute", **LOOPED),
    "stages that share inputs": case(TIED, 5, virtual=2, input_every=3, **LOOPED),
    "stages that offload": case(GQA, 5, virtual=4, ratio=0.4, last_too=True, steps=2, **LOOPED),
    "stages whose keys leave": case(
        MQA, 5, virtual=3, ratio=0.5, policy="rebuilt", kv_offloaded=(0, 2), queues="lazy",
        steps=2, **LOOPED,
    ),
    "stages that recompute keys": case(
        TIED, 4, virtual=4, policy="recompute", kv_recomputed=(0, 1, 3), **LOOPED
    ),
    "streamed weights": case(GQA, 4, virtual=4, streams=("weights",), steps=2, **LOOPED),
    "streamed gradients": case(MQA, 5, virtual=3, streams=("gradients",), steps=2, **LOOPED),
    "streamed, keys recomputed": case(
        TIED, 4, virtual=2, streams=("weights", "gradients"), kv_recomputed=(0,), steps=2, **LOOPED
    ),
    "streamed, stages in turn": case(
        GQA, 4, virtual=2, streams=("weights", "gradients"),
        **{**LOOPED, "schedule": "interleaved_seq1f1b"},
    ),
}  # fmt: skip

PIPELINES = {
    "sppo": case(GQA, 3, pp=2, cuts=(0, 3, 4, 11, 17)),
    "seq1f1b": case(GQA, 4, pp=3, schedule="seq1f1b", **THREE),
    "seq_zb_h1": case(GQA, 5, pp=4, schedule="seq_zb_h1", cuts=(0, 3, 4, 11, 17)),
    "interleaved_seq1f1b": case(
        GQA, 5, pp=2, virtual=2, schedule="interleaved_seq1f1b", **THREE
    ),
    "looped_bfs": case(GQA, 7, pp=3, virtual=2, **LOOPED),
    "gpipe": case(GQA, 5, pp=4, schedule="gpipe", **THREE),
    "1f1b": case(GQA, 3, pp=2, schedule="1f1b", cuts=(0, 9)),
    "interleaved_1f1b": case(GQA, 7, pp=3, virtual=2, schedule="interleaved_1f1b", **WHOLE),
    "zb_h1": case(GQA, 5, pp=4, schedule="zb_h1", **WHOLE),
    "sppo, equal sequences": case(GQA, pp=2, cuts=(0, 3, 4, 11, 17), replica_sequences=4),
    "seq_zb_h1, equal sequences": case(
        GQA, pp=2, schedule="seq_zb_h1", cuts=(0, 3, 4, 11, 17), replica_sequences=4
    ),
    # One key and one subsequence: its dV is all of the KV store's buffer.
    **{
        f"weight gradients that wait, {schedule} {kind} {sp}": case(
            replace(MQA, heads=2), pp=2, sp=sp, sequence_parallel=kind, schedule=schedule,
            cuts=(0, 9), replica_sequences=4, steps=2,
        )
        for schedule, kind, sp in (
            ("zb_h1", "ulysses", 1), ("zb_h1", "megatron", 2),
            ("seq_zb_h1", "megatron", 1), ("seq_zb_h1", "ulysses", 2),
        )
    },
    "weight gradients that wait, biases of one rank": case(
        GPT, 1, sp=2, sequence_parallel="megatron", schedule="seq_zb_h1", cuts=(0, 5)
    ),
    "steps": case(TIED, pp=2, dp=2, steps=3, **TWO),
    "offloading": case(
        GQA, 4, pp=2, sp=2, ratio=0.7, cuts=(0, 4, 9, 14, 19), replica_sequences=3, steps=2
    ),
    "keys leave, replicas": case(
        GQA, 5, dp=2, pp=2, zero=3, virtual=2, kv_offloaded=(0, 1), ratio=0.5, **LOOPED
    ),
    "keys recomputed, three stages": case(
        GQA, 7, pp=2, virtual=3, kv_recomputed=(0, 1, 2, 3), **{**LOOPED, "replica_sequences": 1}
    ),
    "keys recomputed, shared tokens": case(
        GQA, 5, pp=2, sp=2, virtual=2, kv_recomputed=(0, 1), **LOOPED
    ),
}  # fmt: skip

SHARED = {
    **{
        f"{kind}, {keys} of 12 heads, {dp} {pp} {sp}": case(
            replace(MQA, heads=12, kv_heads=keys), 4, dp=dp, pp=pp, sp=sp, sequence_parallel=kind,
            cuts=(0, 5, 9, 23), other_cuts=(0, 4, 13), replica_sequences=2,
        )
        for kind, keys, dp, pp, sp in (
            ("ulysses", 1, 1, 1, 4), ("ulysses", 12, 1, 1, 3),
            ("megatron", 2, 1, 2, 4), ("megatron", 12, 1, 1, 3),
        )
    },
    **{
        f"all axes, {model.family}": case(model, dp=2, pp=2, sp=2, policy=policy, **TWO)
        for model, policy in ((GPT, "retain"), (MIXED, "keep_attention"))
    },
    **{
        f"megatron, {name}": case(
            model, dp=1 + number % 2, pp=2 - number % 2, sp=2, sequence_parallel="megatron",
            policy=POLICIES[number % 3], **TWO,
        )
        for number, (name, model) in enumerate(MODELS.items())
        if name not in ("mha", "gpt, mqa", "learned positions")
    },
    "megatron, zero 3": case(
        TIED, 3, dp=3, sp=2, sequence_parallel="megatron", zero=3, steps=2, **TWO
    ),
    "megatron, offloading": case(
        replace(GQA, heads=8), 4, pp=2, sp=4, sequence_parallel="megatron", ratio=0.7, steps=2,
        cuts=(0, 5, 11, 20), other_cuts=(0, 4, 13), replica_sequences=2,
    ),
    **{
        f"megatron, shared inputs, {policy}": case(
            GQA, 5, sp=2, sequence_parallel="megatron", policy=policy, input_every=3, **TWO
        )
        for policy in POLICIES[1:]
    },
    "zero 2, replicas": case(MQA, dp=2, zero=2, steps=2, **TWO),
    "zero 3, three replicas": case(TIED, dp=3, zero=3, steps=2, schedule="seq_zb_h1", **TWO),
    "zero 2, all axes": case(GPT, dp=2, pp=2, sp=2, zero=2, policy="retain", **TWO),
    "zero 3, all axes": case(MIXED, dp=2, pp=2, sp=2, zero=3, policy="recompute", **TWO),
    "zero 3, stages in turn": case(
        GQA, 4, dp=2, pp=2, virtual=2, zero=3, schedule="interleaved_seq1f1b", **THREE
    ),
    "zero 2, stages in turn": case(
        GQA, 4, dp=2, pp=2, virtual=2, zero=2, schedule="interleaved_1f1b", **WHOLE
    ),
    # The vocabulary has fewer rows than there are ranks.
    "zero 2, fewer rows than ranks": case(ODD, dp=3, zero=2, **TWO),
    "zero 3, fewer rows than ranks": case(ODD, dp=3, zero=3, **TWO),
    "zero 3, offloading": case(MQA, 4, dp=2, pp=2, zero=3, ratio=0.5, **TWO),
    # Both ends of the model are stages of each rank, and reduced bucket by bucket.
    **{
        f"tied ends of a rank, zero {zero}": case(
            replace(MHA, tied=True), 3, dp=2, virtual=2, zero=zero, **LOOPED
        )
        for zero in (0, 2)
    },
}  # fmt: skip

MSP = {
    **{
        f"{len(cuts) - 1} subsequences on {pp} ranks": case(
            GQA, 4, pp=pp, schedule="sppo_msp", cuts=cuts, policy="keep_attention"
        )
        for pp, cuts in (
            (2, (0, 9, 23)), (3, PIECES), (4, (0, 6, 15, 19, 26, 33)),
            (2, (0, 7, 12, 18, 22, 29, 34, 40, 45, 49)),
        )
    },
    **{
        f"{model.family}, {policy}": case(
            model, 4, pp=2, schedule="sppo_msp", cuts=PIECES, policy=policy
        )
        for model, policy in ((MQA, "retain"), (LATE_WINDOW, "keep_attention"), (GPT, "recompute"))
    },
    "shared tokens": case(
        GQA, 4, pp=2, sp=4, schedule="sppo_msp", cuts=(0, 17, 33, 49, 60), policy="keep_attention"
    ),
    "all axes": case(
        GQA, 4, dp=2, pp=2, sp=2, schedule="sppo_msp", cuts=(0, 6, 15, 19, 26, 33),
        policy="recompute",
    ),
    "stages of a rank": case(
        GQA, 7, pp=3, virtual=2, schedule="sppo_msp", cuts=(0, 6, 15, 19, 26, 33),
        other_cuts=PIECES, replica_sequences=2, steps=2,
    ),
    "offloading": case(
        GQA, 4, pp=2, virtual=2, schedule="sppo_msp", ratio=1.0, cuts=PIECES, replica_sequences=2,
        steps=2,
    ),
    "zero 2, replicas": case(
        TIED, 4, dp=2, pp=2, schedule="sppo_msp", zero=2, cuts=(0, 12, 25, 41), replica_sequences=2,
        steps=2,
    ),
}  # fmt: skip

PACKED = {
    "sppo": samples(MHA, slices=5, policy="retain"),
    "shared tokens, seq1f1b": samples(GQA, sp=2, slices=7, schedule="seq1f1b"),
    "shared weights, seq_zb_h1": samples(
        MQA, sp=2, sequence_parallel="megatron", slices=3, schedule="seq_zb_h1", policy="recompute"
    ),
    "stages, gpipe": samples(LATE_WINDOW, pp=2, slices=4, schedule="gpipe", ratio=0.5),
    "stages, shared tokens, stages in turn": samples(
        TIED, 4, pp=2, sp=2, virtual=2, slices=3, schedule="interleaved_seq1f1b"
    ),
    "stages, shared weights, looped": samples(
        GPT, 4, pp=2, sp=2, sequence_parallel="megatron", virtual=2, slices=6,
        schedule="looped_bfs", kv_offloaded=(0, 1), ratio=1.0, last_too=True,
    ),
    "three stages, 1f1b": samples(
        MODELS["gpt, mqa"], 3, pp=3, schedule="1f1b", policy="keep_attention"
    ),
    "four stages, zb_h1": samples(MIXED, 5, pp=4, schedule="zb_h1", zero=3),
    "replicas, interleaved_1f1b": samples(
        MODELS["learned positions"], 4, dp=2, pp=2, virtual=2, schedule="interleaved_1f1b",
        input_every=2,
    ),
    "shared tokens, zero 2": samples(MHA, sp=2, slices=2, zero=2),
    "mixed levels": samples(TIED, 3, pp=3, slices=6, mixed=True, pace=0.5),
    "mixed levels, keys recomputed": samples(
        GPT, 5, pp=2, virtual=2, slices=5, schedule="looped_bfs", mixed=True, kv_recomputed=(0, 1)
    ),
}  # fmt: skip

ALL = Trainable(Adapter(rank=3, scale=0.7), ())
UPPER = Trainable(Adapter(rank=2, scale=1.0, targets=("q", "k", "down"), layers=(2, 3)), ())
WITH_NORMS = Trainable(ALL.adapter, ("*norm.*", "embed.*"))
SOME = Trainable(only=("layers.1.*", "*q.bias", "layers.3.mlp_norm.*"))
HEAD = Trainable(only=("head.*",))
TENSOR = {"sequence_parallel": "megatron"}
KEYS_OF_FOUR = replace(MQA, heads=12, kv_heads=2)
FROZEN = {
    "pipeline, nothing trains below": case(GQA, 4, pp=2, trainable=UPPER, **TWO),
    "pipeline, deferred": case(
        GPT, 5, pp=4, schedule="seq_zb_h1", trainable=WITH_NORMS, cuts=(0, 3, 4, 11, 17)
    ),
    "pipeline, only the head trains": case(MQA, 4, pp=3, trainable=HEAD, zero=2, dp=2, **TWO),
    "stages in turn, zero 3": case(
        GQA, 4, dp=2, pp=2, virtual=2, zero=3, schedule="interleaved_seq1f1b", trainable=UPPER,
        **{**THREE, "replica_sequences": 2},
    ),
    "shared tokens, zero 2": case(MIXED, 4, dp=2, sp=2, zero=2, trainable=SOME, **TWO),
    "replicas, zero 0": case(LATE_WINDOW, 4, dp=2, pp=2, zero=0, trainable=SOME, **TWO),
    "all axes, zero 3": case(GPT, 2, dp=2, pp=2, sp=2, zero=3, trainable=ALL, **TWO),
    "megatron, keys of four ranks": case(
        KEYS_OF_FOUR, 2, sp=4, trainable=ALL, **TENSOR,
        cuts=(0, 5, 9, 23), other_cuts=(0, 4, 13), replica_sequences=2,
    ),
    "megatron, tied, zero 3": case(
        TIED, 3, pp=2, sp=2, dp=2, zero=3, trainable=WITH_NORMS, **TENSOR, **TWO
    ),
    "megatron, biases": case(GPT, 4, pp=2, sp=2, trainable=SOME, **TENSOR, **TWO),
    "looped, frozen weights streamed": case(
        TIED, 5, virtual=3, streams=("frozen",), trainable=ALL, steps=2, **LOOPED
    ),
    "looped, weights and sums streamed, zero 3": case(
        MQA, 4, pp=2, dp=2, virtual=2, zero=3, streams=("weights", "gradients"), trainable=UPPER,
        steps=2, **LOOPED,
    ),
    "pieces of units": case(
        GQA, 4, pp=2, schedule="sppo_msp", cuts=PIECES, trainable=WITH_NORMS
    ),
    "pieces of units, shared tokens": case(
        GQA, 4, pp=2, sp=2, schedule="sppo_msp", trainable=UPPER,
        cuts=(0, 17, 33, 49, 60), policy="keep_attention",
    ),
}  # fmt: skip
"""Adapters and frozen weights."""

LAYERS = {
    **{
        f"{model.family}, {policy}": replace(case(model, 4, policy=policy, **TWO), documents=2)
        for model in (OLMO, GEMMA, GPT_OSS, GRANITE, GLM)
        for policy in POLICIES
    },
    **{
        f"{model.family}, {name}": case(model, 4, **leg)
        for model in (OLMO, GEMMA, GPT_OSS, GRANITE, GLM)
        for name, leg in (
            ("rows recomputed", {"pp": 2, "ratio": 0.6, "policy": "rebuilt", **TWO}),
            ("shared inputs", {"virtual": 2, "input_every": 3, **LOOPED}),
            ("keys recomputed", {"virtual": 4, "kv_recomputed": (0, 1), **LOOPED}),
            ("all axes", {"dp": 2, "pp": 2, "sp": 2, "zero": 3, "policy": "recompute", **TWO}),
            ("pieces", {"pp": 2, "sp": 2, "schedule": "sppo_msp", "cuts": PIECES}),
            ("deferred", {"pp": 2, "schedule": "seq_zb_h1", **THREE}),
        )
    },
    **{
        f"{model.family}, megatron, {policy}": case(
            model, 3, pp=1, sp=2, sequence_parallel="megatron", policy=policy, input_every=2, **TWO
        )
        for model in (GEMMA, GPT_OSS, GRANITE, GLM)
        for policy in POLICIES[1:]
    },
}  # fmt: skip
"""Norms, scales, sinks, rotations and windows by layer."""

_HYBRID = replace(GQA, heads=4, layers=4, window=4, pattern="ssf")
_AGAIN = {"recomputes_windows": True, "cuts": (0, 3, 5, 11, 17)}
WINDOWS = {
    "documents": replace(
        case(replace(_HYBRID, window=9), policy="recompute", **_AGAIN), documents=4
    ),
    "ulysses": case(_HYBRID, pp=2, sp=2, policy="keep_attention", **_AGAIN),
    "megatron": case(_HYBRID, sp=2, sequence_parallel="megatron", policy="recompute", **_AGAIN),
    "moved and shared inputs": case(
        _HYBRID, zero=3, dp=2, ratio=0.6, policy="kept", input_every=2, **_AGAIN
    ),
    "looped": case(
        _HYBRID, pp=2, virtual=2, recomputes_windows=True, kv_recomputed=(0, 1), **LOOPED
    ),
    "shared units": case(_HYBRID, pp=2, schedule="sppo_msp", cuts=(0, 9, 14, 21, 30)),
    "samples": samples(_HYBRID, slices=5, recomputes_windows=True),
}
"""Layers with and without a window, and keys that are kept in part."""

PINNED = {
    f"{group}: {name}": one
    for group, cases in (
        ("one rank", ONE_RANK),
        ("pipeline", PIPELINES),
        ("shared", SHARED),
        ("msp", MSP),
        ("samples", PACKED),
        ("frozen", FROZEN),
        ("layers", LAYERS),
        ("windows", WINDOWS),
    )
    for name, one in cases.items()
}
"""By name."""
