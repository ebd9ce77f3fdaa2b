"""Draws a case from a seed: any combination that training does not refuse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from sppo.config.adapter import TARGETS
from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes, parameter_shapes
from sppo.cost.trainable import Adapter, Trainable
from sppo.schedule.orders.names import LOOPED, WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES, order_of
from tests.offload.emulated_lane import SCHEDULERS
from tests.random_training.case import (
    EXPERTS,
    FAMILIES,
    LINEAR_ATTENTION,
    ROPES,
    Case,
    Leg,
    Samples,
    Shape,
)

T = TypeVar("T")

_SEQUENCE_SCHEDULES = ("sppo", "seq1f1b", "seq_zb_h1", "gpipe", "interleaved_seq1f1b", "looped_bfs")
_SCHEDULES = (*_SEQUENCE_SCHEDULES, *WHOLE_SEQUENCES)
_BOTH = ("weights", "gradients")
_MAY_NOT_MATTER = (
    *("q", "k", "q_norm", "k_norm", "linear_q", "linear_k", "conv_q", "conv_k"),
    *("linear_decay", "linear_beta", "decay"),
)
"""Their gradients are zero where attention sees one key, and those of a key bias often are. A norm
makes outputs of linear attention for one key independent of all but its value."""
_GRIDS = tuple(
    (dp, pp, sp) for dp in (1, 2, 3) for pp in (1, 2, 3, 4) for sp in (1, 2, 3, 4)
    if dp * pp * sp <= 8
)  # fmt: skip


def draw(seed: int) -> Case:
    """The case of a seed."""
    drawing = _Draw(seed)
    return drawing.with_router_losses(drawing.case())


class _Draw:
    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, random.Random(seed)

    def case(self) -> Case:
        chance, pick = self._chance, self._pick
        shape = self._with_linear_attention(self._with_experts(self._shape()))
        fine = shape.experts or shape.has_linear_attention
        case = Case(
            seed=self._seed,
            # In bf16 rounding would choose other experts than the oracle's, and norms of outputs
            # of linear attention that are nearly zero would magnify it.
            dtype=pick(["fp64", "fp32", "fp32", "fp32" if fine else "bf16"]),
            model=shape,
            documents=pick([2, 3, 5]) if chance(0.3) else 1,
            ignored=pick([0.0, 0.1, 0.5, 0.97]),
            label_smoothing=0.1 if chance(0.2) else 0.0,
            z_loss=1e-2 if chance(0.2) else 0.0,
            clip_norm=pick([1.0, 0.0, 0.05]),
            weight_decay=pick([0.1, 0.0]),
        )
        legs = tuple(self._leg(shape) for _ in range(pick([1, 1, 1, 2, 2, 3])))
        if chance(0.2):
            samples = self._samples(legs)
            legs = tuple(self._of_samples(leg, samples) for leg in legs)
            return self._with_trained(replace(case, legs=legs, samples=samples, documents=1))
        shortest = min(cuts[-1] for leg in legs for cuts in (leg.cuts, leg.other_cuts) if cuts)
        case = replace(case, legs=legs, documents=min(case.documents, shortest))
        # Drawn last, so that all else of a seed's case is as it was without turns and adapters.
        return self._with_trained(replace(case, turn=pick([4, 9, 20]) if chance(0.25) else 0))

    def _with_trained(self, case: Case) -> Case:
        """Adapters, or some of the parameters, train: often."""
        if self._chance(0.5):
            return self._with_windows(case)
        model = case.model.config()
        trainable = self._adapters(model) if self._chance(0.6) else self._some(model)
        legs = (replace(leg, streams=self._frozen_streams(leg)) for leg in case.legs)
        return self._with_windows(replace(case, trainable=trainable, legs=tuple(legs)))

    def _with_windows(self, case: Case) -> Case:
        """Layers with a window alternate with others, and recompute their K and V: often."""
        if case.model.window is None:
            return case
        if self._chance(0.4) and not case.model.has_linear_attention:
            pattern = self._pick(["sf", "fs", "ssf", "sff"])
            case = replace(case, model=replace(case.model, pattern=pattern, window_from=0))
        legs = (
            replace(leg, recomputes_windows=self._chance(0.6) and leg.schedule != "sppo_msp")
            for leg in case.legs
        )
        return replace(case, legs=tuple(legs))

    def _adapters(self, model: ModelConfig) -> Trainable:
        chance, pick = self._chance, self._pick
        names = {name for layer in range(model.num_layers) for name in layer_shapes(model, layer)}
        targets = [target for target in TARGETS if f"{target}.weight" in names]
        some = {*self._random.sample(targets, pick(range(len(targets))) + 1)}
        some.add(pick([target for target in targets if target not in _MAY_NOT_MATTER]))
        layers = range(model.num_layers)
        some_layers = self._random.sample(layers, pick(layers) + 1)
        if model.linear_attention is not None:  # attention has all targets, somewhere
            some_layers += [i for i in layers if not model.layer_type(i).linear][:1]
        adapter = Adapter(
            rank=pick([1, 2, 3, 5]),
            scale=pick([1.0, 0.5, 1.5]),
            targets=tuple(target for target in targets if target in some),
            layers=tuple(sorted({*some_layers})) if chance(0.4) else None,
        )
        whole = (glob for glob in ("*norm.*", "embed.*", "head.*") if chance(0.2))
        return Trainable(adapter, tuple(whole))

    def _some(self, model: ModelConfig) -> Trainable:
        """Parameters that globs match, and one at least."""
        pick, names = self._pick, [*parameter_shapes(model)]
        globs = [f"layers.{pick(range(model.num_layers))}.*", "*.bias", "*norm.*", pick(names)]
        globs += ["head.*", "embed.*", "*.[kv].*"]
        one = pick([name for name in names if name.split(".")[-2] not in _MAY_NOT_MATTER])
        return Trainable(only=(one, *self._random.sample(globs, pick([0, 1, 2]))))

    def _frozen_streams(self, leg: Leg) -> tuple[str, ...]:
        """What lives in another tier: of the weights often only the frozen ones."""
        return ("frozen",) if "weights" in leg.streams and self._chance(0.5) else leg.streams

    def _samples(self, legs: Sequence[Leg]) -> Samples:
        """Documents of which at least one is a sample, and steps with one for each replica."""
        longest, replicas = self._pick([5, 16, 40]), max(leg.dp for leg in legs)
        tokens = [self._pick([2, 3, 6, longest, 2 * longest, 3 * longest]) for _ in range(9)]
        documents = tuple(self._random.randint(2, most) for most in tokens)
        by_samples = self._chance(0.5)
        most = self._random.randint(replicas, 9)
        return Samples(
            documents=(self._random.randint(2, longest), *documents),
            longest=longest,
            longer=self._pick(["cut", "drop"]),
            samples_per_step=most if by_samples else 0,
            tokens_per_step=0 if by_samples else longest * replicas + 7 * (most - replicas),
            mixed=self._chance(0.3),
            pace=self._pick([None, None, 0.0, 0.5]),
        )

    def _of_samples(self, leg: Leg, samples: Samples) -> Leg:
        """A leg as one that trains on samples can be."""
        whole = leg.schedule in WHOLE_SEQUENCES
        leg = replace(
            leg,
            schedule=order_of(leg.schedule, num_virtual=leg.virtual),
            # Replicas that run programs of their own meet at the end of a step only.
            zero=leg.zero if leg.dp == 1 else min(leg.zero, 1),
            cuts=(0, samples.longest),
            other_cuts=(),
            replica_sequences=1,
            slices=1 if whole else self._random.randint(1, max(1, samples.longest // leg.sp)),
            evaluates=False,
            kv_offloaded=(),
            kv_recomputed=(),
        )
        if leg.schedule != LOOPED or leg.virtual == 1:
            return leg
        # What a plan says of K and V: all stages of a rank but its last.
        away = tuple(range(leg.num_stages - leg.pp))
        choices = [{}, {"kv_offloaded": away}] if leg.tier else [{}]
        if not leg.tier and leg.input_every == 1:
            choices.append({"kv_recomputed": away})
        return replace(leg, **self._pick(choices))

    def _shape(self) -> Shape:
        chance, pick = self._chance, self._pick
        kv_heads, group = pick([1, 1, 2, 3, 4]), pick([1, 2, 3, 4])
        family = pick(list(FAMILIES))
        learned = FAMILIES[family].get("position") == "learned"
        layers = pick([1, 2, 2, 3, 4])
        window = self._random.randint(1, 20) if chance(0.3) else None
        head_size = pick([4, 6, 8])
        return Shape(
            family=family,
            layers=layers,
            hidden=pick([12, 16, 24]),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_size=head_size,
            mlp_size=pick([12, 24, 48]),
            vocab_size=pick([17, 32]),
            tied=chance(0.4),
            window=window,
            window_from=self._random.randint(0, layers) if window and chance(0.4) else 0,
            rope="" if learned or chance(0.6) else pick(list(ROPES)),
            rotary=1 - 2 / head_size if family == "glm" else 1.0,
        )

    def _with_experts(self, shape: Shape) -> Shape:
        """Experts in place of MLPs: often, by a generator of their own."""
        own = random.Random(f"experts {self._seed}")
        if not shape.config().gated or own.random() < 0.6:
            return shape
        return replace(shape, experts=own.choice(list(EXPERTS)))

    def _with_linear_attention(self, shape: Shape) -> Shape:
        """Linear attention in some layers, and a gate in others: often, by a generator of its own.

        Layers with a window stay where the family has them.
        """
        own = random.Random(f"linear attention {self._seed}")
        gated = own.random() < 0.15
        if shape.layers == 1 or own.random() < 0.6:
            return replace(shape, gated=gated)
        has_window = shape.config().sliding_window is not None
        patterns = ["ls", "sl", "lls", "lsf", "flls"] if has_window else ["lf", "fl", "llf", "lllf"]
        pattern = own.choice([one for one in patterns if {*one[: shape.layers]} > {"l"}])
        return replace(
            shape, pattern=pattern, window_from=0, gated=own.random() < 0.7, norm_eps=0.1
        )

    def with_router_losses(self, case: Case) -> Case:
        """Losses of the routers: often, but not in samples, which are packed by other rules.

        MSP shares no loads of experts.
        """
        own = random.Random(f"routers {self._seed}")
        if not case.model.experts or case.samples is not None or own.random() < 0.4:
            return case
        balance, z = own.choice([0.0, 0.02]), own.choice([0.0, 0.003])
        has_msp = any(leg.schedule == "sppo_msp" for leg in case.legs)
        return replace(case, router_losses=(0.0 if has_msp else balance, z))

    def _leg(self, shape: Shape) -> Leg:
        chance, pick = self._chance, self._pick
        dp, pp, sp = self._grid(shape)
        linear = shape.has_linear_attention
        leg = Leg(
            steps=pick([1, 2, 2]),
            replica_sequences=pick([1, 2, 3, 4] if dp == 1 else [1, 2]),
            dp=dp,
            pp=pp,
            sp=sp,
            sequence_parallel="megatron" if self._splits(shape, sp) and chance(0.5) else "ulysses",
            schedule=pick(_SCHEDULES),
            zero=pick([0, 1, 1, 2, 3]),
            bucket_bytes=pick([400, 25_000_000]),
            input_every=pick([2, 3]) if chance(0.25) and not linear else 1,
            evaluates=chance(0.3),
            debug=chance(0.3),
        )
        if leg.schedule in WITH_VIRTUAL_STAGES and shape.layers >= 2 * pp and chance(0.8):
            leg = replace(leg, virtual=self._random.randint(2, shape.layers // pp))
        megatron = sp > 1 and leg.sequence_parallel == "megatron"
        if pp > 1 and not megatron and leg.zero != 3 and chance(0.3) and not linear:
            leg = replace(leg, schedule="sppo_msp")
        # States and rows of convolutions meet more edges in units of one, two and three tokens.
        short = 0.6 if linear else 0.3
        leg = replace(leg, cuts=self._cuts(leg, short=short))
        if leg.replica_sequences > 1 and chance(0.2):
            leg = replace(leg, other_cuts=self._cuts(leg, short=short))
        return self._with_streams(self._with_keys(self._with_rows(leg, megatron=megatron)))

    def _grid(self, shape: Shape) -> tuple[int, int, int]:
        """Degrees that the model can be divided by; few ranks more often, and pipelines."""
        if self._chance(0.35):
            return 1, 1, 1
        grids = [
            (dp, pp, sp)
            for dp, pp, sp in _GRIDS
            if pp <= shape.layers
            and shape.heads % sp == 0
            and (shape.kv_heads % sp == 0 or sp % shape.kv_heads == 0)
            and (LINEAR_ATTENTION["key_heads"] % sp == 0 or not shape.has_linear_attention)
        ]
        weights = [(4 if pp > 1 else 1) / (dp * pp * sp) for dp, pp, sp in grids]
        return self._random.choices(grids, weights=weights)[0]

    @staticmethod
    def _splits(shape: Shape, sp: int) -> bool:
        """Whether Megatron can share the weights out."""
        whole_norms = FAMILIES[shape.family].get("qk_norm") == "all"
        refused = whole_norms or shape.experts or shape.has_linear_attention
        return sp > 1 and shape.mlp_size % sp == 0 and not refused

    def _cuts(self, leg: Leg, *, short: float) -> tuple[int, ...]:
        """Cuts of subsequences that every rank has a part of, at odd places.

        Args:
            leg: degrees and schedule.
            short: share of the subsequences that are short, where edges meet.
        """
        count = 1 if leg.schedule in WHOLE_SEQUENCES else self._pick([1, 1, 2, 3, 5])
        least = 2 * leg.sp * leg.pp if leg.schedule == "sppo_msp" else leg.sp
        most = max(least, 64 // count)
        cuts = [0]
        for _ in range(count):
            upper = min(most, least + 3 if self._chance(short) else 16)
            cuts.append(cuts[-1] + self._random.randint(least, max(least, upper)))
        cuts[-1] = max(cuts[-1], cuts[-2] + least)
        return tuple(cuts)

    def _with_rows(self, leg: Leg, *, megatron: bool) -> Leg:
        """What happens to saved tensors."""
        if self._chance(0.6):
            return replace(leg, policy=self._pick(["retain", "keep_attention", "recompute"]))
        # Ranks over which weights are sharded recompute whole classes only.
        rest = "kept" if megatron else self._pick(["kept", "rebuilt"])
        return replace(
            leg,
            policy=rest,
            ratio=self._pick([1.0, round(self._random.random(), 2)]),
            last_too=self._chance(0.3),
            tier=self._pick(["host", "disk"]),
            queues=self._pick(["threads", *SCHEDULERS]),
            lag=self._pick([0, 1, 2]),
        )

    def _with_keys(self, leg: Leg) -> Leg:
        """K and V of some stages do not stay: often where a rank has several, never with MSP."""
        if leg.schedule == "sppo_msp" or not self._chance(0.6 if leg.virtual > 1 else 0.2):
            return leg
        away = tuple(s for s in range(leg.num_stages) if self._chance(0.7)) or (0,)
        if not leg.tier and leg.input_every == 1:
            again = tuple(s for s in away if self._chance(0.6))
            leg = replace(leg, kv_recomputed=again)
            away = tuple(s for s in away if s not in again)
        if not away:
            return leg
        if not leg.tier:
            rest = "kept" if leg.policy == "retain" else "rebuilt"
            leg = replace(leg, policy=rest, tier=self._pick(["host", "disk"]))
            leg = replace(leg, queues=self._pick(["threads", *SCHEDULERS]))
        return replace(leg, kv_offloaded=away)

    def _with_streams(self, leg: Leg) -> Leg:
        """Weights and gradients live in another tier: often with several stages, never with MSP."""
        if leg.schedule == "sppo_msp" or not self._chance(0.4 if leg.virtual > 1 else 0.1):
            return leg
        return replace(leg, streams=self._pick([("weights",), ("gradients",), _BOTH, _BOTH]))

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _pick(self, values: Sequence[T]) -> T:
        return self._random.choice(values)
