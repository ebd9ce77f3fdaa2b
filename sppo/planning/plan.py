"""The execution plan: everything that was decided before the run, and what it was based on.

The solver writes it, the simulator draws it, the trainer runs it and is held to its predictions.
It is self-contained: the part of the run it was made for and the machine are in it, so it can be
priced again anywhere, and a run that has changed since is told which key differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sppo.activations.placement import SubsequencePlacement
from sppo.config.json_file import JsonError, read_json
from sppo.config.model import ModelConfig
from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.tier_memory import tier_buckets
from sppo.cost.state_tiers import StateTiers
from sppo.hardware.description import HardwareSpec, Provenance, Tier
from sppo.quoting import one_line, quoted
from sppo.schedule.transfers.kv_placement import KVPlacement, kv_of_turns
from sppo.version import __version__

PLAN_VERSION = 1
"""Raised whenever the meaning of a field changes; other versions are refused."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of the pipeline.

    Attributes:
        first_layer: First layer of the stage.
        num_layers: Number of its layers.
        subsequences: What happens to the saved tensors of each subsequence. Their
            `slot_offset_bytes` are within the stage's own part of its rank's tier.
        memory: Predicted memory of one device of the rank that has the stage. A rank with several
            virtual stages has them all in it, and each of them says the same.
        kv: What becomes of the stage's K and V between its forward and its backward.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    first_layer: int
    num_layers: int
    subsequences: tuple[SubsequencePlacement, ...]
    memory: StageMemory
    kv: KVPlacement = "retained"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time, memory and rates of one step.

    Attributes:
        provenance: Provenance of the machine's figures: measured, calibrated or analytic.
        simulated: Whether the step was simulated, rather than computed in closed form.
        step_s: Time of the whole step.
        forward_s: Time of the forwards of the busiest rank.
        backward_s: Time of its backwards, with what they recompute.
        update_s: Time of reducing gradients and of the optimizer step.
        exposed_copy_s: Time of waiting for copies.
        tokens_per_s_per_gpu: Tokens of a step over its time, for each device.
        mfu: Model FLOPs over time and peak.
        bubble_fraction: Idle share of all ranks.
        device_peak_bytes: Memory of the fullest device.
        host_peak_bytes: Host memory behind it.
        disk_peak_bytes: Bytes on the disk behind it.
        offload_ratios: Fraction of its saved bytes that each subsequence offloads, on the first
            stage.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    provenance: Provenance
    simulated: bool
    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    exposed_copy_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    bubble_fraction: float
    device_peak_bytes: int
    host_peak_bytes: int
    disk_peak_bytes: int
    offload_ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Everything that is decided before a run, and what was predicted of it.

    Attributes:
        version: Version of this format.
        made_by: Version of SPPO that made it.
        run: The keys of the run file that the plan rests on, by section.
        run_digest: SHA-256 of these keys.
        hardware: Description of the machine that the plan is for.
        hardware_digest: SHA-256 of this description.
        data_parallel_degree: Number of replicas.
        pipeline_parallel_degree: Ranks of a pipeline.
        sequence_parallel_degree: Devices over which each subsequence is sharded.
        sequence_parallel: "ulysses" or "megatron".
        zero: ZeRO level: which state is sharded over ranks that would hold the same.
        sequences: Sequences per step of one replica.
        boundaries: Cuts of a sequence.
        schedule: Name of the schedule.
        policy: Activation policy, by what it does.
        stages: Each stage, in the order of their layers. Stage `s` is on pipeline rank
            `s % pipeline_parallel_degree`.
        predicted: Predicted time and memory of a step.
        program_digest: Digest of the program of a step, `schedule.program.step_program`; None in
            plans that were made before it stood there.
        virtual_stages: Stages on each pipeline rank; 1 in plans that were made before it stood
            there.
        state: Where the training state lives; None in plans that were made before it stood there.
        activation_tier: Tier of offloaded activations, K and V; None in plans that were made
            before it stood there, which use the nearest tier.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: int
    made_by: str
    run: dict[str, Any]
    run_digest: str
    hardware: HardwareSpec
    hardware_digest: str
    data_parallel_degree: int
    pipeline_parallel_degree: int
    sequence_parallel_degree: int
    sequence_parallel: str
    zero: int
    sequences: int
    boundaries: tuple[int, ...]
    schedule: str
    policy: str
    stages: tuple[StagePlan, ...]
    predicted: Prediction
    program_digest: str | None = None
    virtual_stages: int = 1
    state: StateTiers | None = None
    activation_tier: Tier | None = None

    @property
    def state_tiers(self) -> StateTiers:
        """Return the tiers of the state; before plans said so, only the optimizer could leave."""
        if self.state is not None:
            return self.state
        offloads = self.run["optimizer"]["offload"] and self.hardware.device.kind != "cpu"
        return StateTiers(optimizer="host" if offloads else "device")

    @property
    def model(self) -> ModelConfig:
        """The model it is for."""
        return ModelConfig.model_validate(self.run["model"])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each subsequence."""
        cuts = self.boundaries
        return tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))

    @property
    def rank_memory(self) -> tuple[StageMemory, ...]:
        """Predicted memory of one device of each pipeline rank."""
        return tuple(stage.memory for stage in self.stages[: self.pipeline_parallel_degree])

    @property
    def shares_units(self) -> bool:
        """Return whether several pipeline ranks run shards of one unit (MSP)."""
        return self.schedule == "sppo_msp" and self.pipeline_parallel_degree > 1

    @property
    def offloads_anything(self) -> bool:
        """Return whether any saved tensor, or K and V of any stage, leave the device."""
        return any(
            stage.kv == "offloaded" or any(any(part.offloaded) for part in stage.subsequences)
            for stage in self.stages
        )

    @property
    def tier(self) -> Tier:
        """Tier of offloaded activations, K and V; "device" where there is none for them."""
        return self.activation_tier or self.hardware.node.nearest_tier

    @property
    def kv(self) -> KVPlacement:
        """Placement of K and V of the stages of a rank that do not recompute them."""
        placed = [stage.kv for stage in self.stages[: -self.pipeline_parallel_degree]]
        return next(
            (kv for kv in placed if kv != "recomputed"), placed[0] if placed else "retained"
        )

    @property
    def kv_recomputed(self) -> int:
        """Stages of a rank that recompute theirs where others do not."""
        own = self.stages[:: self.pipeline_parallel_degree]
        return 0 if self.kv == "recomputed" else sum(stage.kv == "recomputed" for stage in own)

    def rank_tier_buckets(self, place: Literal["host", "disk"]) -> tuple[Mapping[str, int], ...]:
        """Return what one device of each pipeline rank has in a tier, by bucket."""
        return tuple(
            tier_buckets(held, place, activations=self.tier, state=self.state_tiers)
            for held in self.rank_memory
        )

    def recomputed_fractions(self, tensor_class: int) -> tuple[float, ...]:
        """Share of each subsequence in which a class is recomputed, averaged over the layers."""
        layers = sum(stage.num_layers for stage in self.stages)
        shares = []
        for index, tokens in enumerate(self.lengths):
            rows = sum(
                stage.num_layers * stage.subsequences[index].recomputed[tensor_class]
                for stage in self.stages
            )
            shares.append(rows / layers / tokens)
        return tuple(shares)


_ADAPTER = TypeAdapter(ExecutionPlan)
_DIGEST = "digest"
_PLANNED_KEYS: Mapping[str, tuple[str, ...] | None] = {
    "model": None,
    "sequence": None,
    "parallel": (
        "data_parallel_degree",
        "pipeline_parallel_degree",
        "virtual_stages",
        "sequence_parallel_degree",
        "sequence_parallel",
        "schedule",
        "multiplexed",
        "zero",
    ),
    "activations": (
        "policy",
        "kv",
        "input_every",
        "offload_ratio",
        "tier",
        "host_memory",
        "disk",
        "disk_memory",
    ),
    "state": None,
    "optimizer": ("offload",),
    "train": ("sequences_per_step", "dtype"),
}
"""Sections of a run file that a plan rests on; None for all their keys."""


def planned_part(run: RunConfig) -> dict[str, Any]:
    """The keys of `run` that a plan rests on, as plain JSON values."""
    whole = run.model_dump(mode="json")
    part = {}
    for section, keys in _PLANNED_KEYS.items():
        values = whole[section]
        part[section] = values if keys is None else {key: values[key] for key in keys}
    return part


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON form."""
    import hashlib

    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def boundaries_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts of a sequence whose subsequences have these lengths."""
    return (0, *accumulate(lengths))


def plan_json(plan: ExecutionPlan) -> dict[str, Any]:
    """Return `plan` as plain values, the content of its file: its fields and their digest."""
    values: dict[str, Any] = json.loads(_ADAPTER.dump_json(plan, by_alias=True))
    return {**values, _DIGEST: digest_of(values)}


def read_plan(path: Path) -> ExecutionPlan:
    """A plan from its file.

    Raises:
        ValueError: not a plan, of another version, changed by hand, or damaged.
        OSError: the file cannot be read.
    """
    values = _parsed(path)
    version = values.get("version") if isinstance(values, dict) else None
    if version != PLAN_VERSION:
        raise ValueError(
            f"plan {path} has version {quoted(version)}, this is sppo {__version__} with plans of "
            f"version {PLAN_VERSION}: make it again with sppo solve RUN.yaml -o {path.name}"
        )
    digest = values.pop(_DIGEST, None)
    try:
        plan = _ADAPTER.validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = one_line(".".join(map(str, first["loc"])))
        raise ValueError(
            f"plan {path}: {where}: {first['msg']}; make it again with sppo solve"
        ) from None
    faults = [*_faults(plan)]
    # As it was written: a version that knows more of machines adds keys to what it has read.
    if plan.hardware_digest != digest_of(values["hardware"]):
        faults.append("its hardware does not match its digest")
    if digest != digest_of(values):
        faults.append("its content does not match its digest")
    if faults:
        raise ValueError(
            f"plan {path} was changed by hand or damaged: {faults[0]}; make it again with sppo "
            "solve"
        )
    return plan


def _parsed(path: Path) -> Any:
    try:
        return read_json(path)
    except JsonError as error:
        raise ValueError(f"plan {error}; make it again: sppo solve") from None


def check_plan_fits(plan: ExecutionPlan, run: RunConfig) -> None:
    """Refuse a plan that was made for another run.

    Raises:
        ValueError: names every key that differs, with both values.
    """
    differences = list(_differences(_with_later_keys(plan.run, run), planned_part(run)))
    if differences:
        raise ValueError(
            f"the plan was made for another run: {'; '.join(differences)}. Make it again with "
            "sppo solve, or undo the change"
        )


def _with_later_keys(planned: Mapping[str, Any], run: RunConfig) -> Mapping[str, Any]:
    """The keys of a plan, with those that plans had not yet when it was made.

    Those had one stage on each rank and retained K and V, which serves a run that asks for that or
    leaves it open, and were made for streams, in which nothing is longer than a sequence.
    """
    virtual = "auto" if run.parallel.virtual_stages == "auto" else 1
    kv = "auto" if run.activations.kv == "auto" else "retain"
    return {
        **planned,
        "sequence": {"longer": "cut", **planned["sequence"]},
        "parallel": {"virtual_stages": virtual, **planned["parallel"]},
        "activations": {"kv": kv, **planned["activations"]},
        "state": planned.get("state") or _state_served(run),
    }


def _state_served(run: RunConfig) -> dict[str, str]:
    """The section of a run that plans had not yet, as far as one without it serves that run."""
    asked = run.state.model_dump(mode="json")
    return {part: tier if tier == "auto" else "device" for part, tier in asked.items()}


def _differences(
    planned: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key in sorted({*planned, *now}):
        before, after = planned.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            was, now_is = one_line(json.dumps(before)), one_line(json.dumps(after))
            yield f"{prefix}{key} was {was}, is {now_is}"


def _faults(plan: ExecutionPlan) -> Iterator[str]:
    """Yield disagreements between the parts of a plan."""
    if plan.run_digest != digest_of(plan.run):
        yield "its run does not match its digest"
        return
    if plan.boundaries[:1] != (0,) or any(tokens < 1 for tokens in plan.lengths):
        yield f"its boundaries {quoted(list(plan.boundaries))} do not rise from 0"
    if len(plan.stages) != plan.pipeline_parallel_degree * plan.virtual_stages:
        yield (
            f"{len(plan.stages)} stages for {plan.pipeline_parallel_degree} ranks with "
            f"{plan.virtual_stages} stages each"
        )
    yield from _kv_faults(plan)
    layers = 0
    for number, stage in enumerate(plan.stages):
        if stage.first_layer != layers:
            yield f"stage {number} begins with layer {stage.first_layer}, not {layers}"
        layers += stage.num_layers
        yield from _stage_faults(stage, number=number, lengths=plan.lengths)
    try:
        model_layers = plan.model.num_layers
    except (ValidationError, KeyError, TypeError):
        yield "its run holds no model that can be read"
        return
    if layers != model_layers:
        yield f"its stages have {layers} layers, its model {model_layers}"


def _kv_faults(plan: ExecutionPlan) -> Iterator[str]:
    """Stages place K and V as :func:`kv_of_turns` spreads them, alike on all ranks."""
    ranks, turns = plan.pipeline_parallel_degree, plan.virtual_stages
    expected = kv_of_turns(plan.kv, recomputed=plan.kv_recomputed, turns=turns)
    for number, stage in enumerate(plan.stages[: ranks * turns]):
        if stage.kv != expected[number // ranks]:
            yield f"stage {number} has its K and V {stage.kv}"


def _stage_faults(stage: StagePlan, *, number: int, lengths: tuple[int, ...]) -> Iterator[str]:
    if len(stage.subsequences) != len(lengths):
        yield f"stage {number} has {len(stage.subsequences)} subsequences, not {len(lengths)}"
        return
    for index, (tokens, part) in enumerate(zip(lengths, stage.subsequences, strict=True)):
        rows = [*zip(part.retained, part.offloaded, part.recomputed, strict=True)]
        if any(min(row) < 0 or sum(row) != tokens for row in rows):
            yield f"stage {number}, subsequence {index}: rows do not add up to {tokens}"
