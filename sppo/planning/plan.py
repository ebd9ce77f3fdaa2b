"""Execution plan: all decisions made before a run, and the inputs that they rest on.

The solver writes a plan, the simulator draws it, and the trainer runs it and reports measured
against predicted figures. A plan is self-contained: it holds the keys of the run file and the
description of the machine that it was made for. It can therefore be priced again on any machine,
and a run file that has changed since is refused with the keys that differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sppo.activations.placement import ActivationPlacement
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.config.json_file import JsonError, read_json
from sppo.config.model import ModelConfig
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory, tier_buckets
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import Trainable, trainable_of_sections
from sppo.cost.workload import Workload
from sppo.hardware.description import HardwareSpec, Provenance, Tier
from sppo.planning.partition import lengths_of
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.quoting import one_line, quoted
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.copies import KVPlacement, WindowedKV
from sppo.version import __version__

PLAN_VERSION = 4
"""Version of the plan format, incremented when the meaning of a field changes. Plans of other
versions are refused."""

_PLANNED_KEYS: dict[str, Any] = {
    "model": True,
    "data": {"samples", "isolate_documents"},
    "sequence": True,
    "parallel": True,
    "activations": True,
    "state": True,
    "train": {"sequences_per_step", "samples_per_step", "tokens_per_step", "dtype"},
}
"""Keys of a run file that a plan holds, by section; True means all keys of the section."""
_EXCEPT: dict[str, Any] = {"parallel": {"timeout_s"}, "activations": {"debug"}}
"""Keys of these sections that no plan rests on."""
_NOT_OF_THE_SHAPE = (
    "preset",
    "from_hf",
    "family",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "init_std",
)
"""Keys of the model that change neither time nor memory: its name, and values of its arithmetic."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Plan of one pipeline stage."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    first_layer: int
    """Index of the first layer of the stage."""
    num_layers: int
    """Number of layers of the stage."""
    subsequences: tuple[SubsequencePlacement, ...]
    """Placement of the saved tensors of each subsequence. Their `slot_offset_bytes` are relative to
    the stage's part of its rank's tier."""
    memory: StageMemory
    """Predicted memory of one device of the rank that has the stage. It covers all virtual stages
    of the rank, which therefore all have the same value."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time, memory and rates of one step."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    provenance: Provenance
    """Provenance of the machine's figures: measured, calibrated or analytic."""
    step_s: float
    """Simulated seconds of the whole step."""
    forward_s: float
    """Seconds of all forwards of the busiest rank."""
    backward_s: float
    """Seconds of all backwards of the busiest rank, including recomputation."""
    update_s: float
    """Seconds of the gradient reduction and the optimizer step."""
    exposed_copy_s: float
    """Seconds in which compute waits for copies."""
    tokens_per_s_per_gpu: float
    """Tokens per second and device."""
    mfu: float
    """Model FLOPs per second over the peak of the devices."""
    bubble_fraction: float
    """Idle share of the time of all pipeline ranks."""
    device_peak_bytes: int
    """Peak memory of the fullest device."""
    host_peak_bytes: int
    """Peak host memory of the device that uses most of it."""
    disk_peak_bytes: int
    """Peak disk space of the device that uses most of it."""
    offload_ratios: tuple[float, ...]
    """Fraction of its saved bytes that each subsequence offloads, on the first stage."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """All decisions made before a run, and the predictions for the run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: int
    """Version of the plan format."""
    made_by: str
    """Version of SPPO that made the plan."""
    run: dict[str, Any]
    """Keys of the run file that the plan was made for, by section."""
    hardware: HardwareSpec
    """Description of the machine that the plan is for."""
    data_parallel_degree: int
    """Number of replicas."""
    pipeline_parallel_degree: int
    """Number of ranks of a pipeline."""
    sequence_parallel_degree: int
    """Number of devices over which each subsequence is sharded."""
    sequence_parallel: Literal["ulysses", "megatron"]
    """How subsequences are sharded."""
    zero: int
    """ZeRO level: which state is sharded over the ranks that would otherwise hold copies."""
    sequences: int
    """Sequences per step of one replica."""
    boundaries: tuple[int, ...]
    """Cuts of a sequence, from 0 to its length."""
    schedule: str
    """Name of the schedule."""
    policy: str
    """Activation policy in effect: "retain" where nothing is offloaded or recomputed."""
    stages: tuple[StagePlan, ...]
    """Plan of each stage, in the order of the layers. Stage `s` is on pipeline rank `s %
    pipeline_parallel_degree`."""
    predicted: Prediction
    """Predicted time and memory of a step."""
    program_digest: str
    """Digest of the program of a step."""
    virtual_stages: int
    """Stages on each pipeline rank."""
    kv: KVPlacement
    """Placement of K and V between the forward and the backward of the stages that do not recompute
    them. The last stage of a rank always retains K and V."""
    kv_recomputed: int
    """Number of stages of each rank that recompute K and V, whatever `kv` is."""
    windowed_kv: WindowedKV
    """Treatment of K and V of layers with a sliding window on stages that retain K and V."""
    state: StateTiers
    """Tiers of the training state."""
    activation_tier: Tier
    """Tier of offloaded activations, K and V; "device" if the machine has no other tier."""

    @property
    def model(self) -> ModelConfig:
        """Configuration of the model that the plan is for."""
        return ModelConfig.model_validate(self.run["model"])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each subsequence."""
        return lengths_of(self.boundaries)

    @property
    def trainable(self) -> Trainable:
        """Parameters that train."""
        return trainable_of_sections(self.run)

    @property
    def rank_memory(self) -> tuple[StageMemory, ...]:
        """Predicted memory of one device of each pipeline rank."""
        return tuple(stage.memory for stage in self.stages[: self.pipeline_parallel_degree])

    @property
    def uses_msp(self) -> bool:
        """True if several pipeline ranks run shards of one unit (MSP)."""
        return self.schedule == "sppo_msp" and self.pipeline_parallel_degree > 1

    @property
    def kv_of_stages(self) -> tuple[KVPlacement, ...]:
        """Placement of each stage's K and V between its forward and its backward."""
        return self.candidate().kv_of_stages

    @property
    def offloads_anything(self) -> bool:
        """True if any saved tensor, or K and V of any stage, leave the device."""
        return "offloaded" in self.kv_of_stages or any(
            any(part.offloaded) for stage in self.stages for part in stage.subsequences
        )

    def candidate(self) -> Candidate:
        """Return the candidate that the plan was made from."""
        workload = Workload(
            self.model,
            self.hardware,
            dtype=self.run["train"]["dtype"],
            sequence_parallel_degree=self.sequence_parallel_degree,
            sequence_parallel=self.sequence_parallel,
            moments=self.run.get("optimizer", {}).get("moments", "fp32"),
            label_share=self.run["data"].get("label_share", 1.0),
            trainable=self.trainable,
        )
        return Candidate(
            workload,
            self.lengths,
            sequences=self.sequences,
            pipeline_parallel_degree=self.pipeline_parallel_degree,
            data_parallel_degree=self.data_parallel_degree,
            schedule=self.schedule,
            policy=self.policy,
            zero=self.zero,
            state=self.state,
            activation_tier=self.activation_tier,
            input_every=self.run["activations"]["input_every"],
            virtual_stages=self.virtual_stages,
            kv=self.kv,
            kv_recomputed=self.kv_recomputed,
            windowed_kv=self.windowed_kv,
        )

    def placement(self) -> ActivationPlacement:
        """Return the placement of every saved tensor."""
        rows = [
            [[getattr(part, name) for part in stage.subsequences] for stage in self.stages]
            for name in ActivationPlacement._fields
        ]
        return ActivationPlacement(*np.array(rows, dtype=np.int64))

    def evaluated(self) -> EvaluatedCandidate:
        """Return the candidate with the placement of the plan."""
        return EvaluatedCandidate(self.candidate(), self.placement())

    def program(self) -> Schedule:
        """Return the program of one step of one data-parallel replica."""
        return self.evaluated().executed_program()

    def rank_tier_buckets(self, place: Literal["host", "disk"]) -> tuple[Mapping[str, int], ...]:
        """Return the bytes of one device of each pipeline rank in a tier, by memory bucket."""
        return tuple(
            tier_buckets(held, place, activations=self.activation_tier, state=self.state)
            for held in self.rank_memory
        )


_ADAPTER = TypeAdapter(ExecutionPlan)
_DIGEST = "digest"


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `values` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def plan_json(plan: ExecutionPlan) -> dict[str, Any]:
    """Return the content of a plan file as plain values: the fields of `plan` and their digest."""
    values: dict[str, Any] = json.loads(_ADAPTER.dump_json(plan, by_alias=True))
    return {**values, _DIGEST: digest_of(values)}


def read_plan(path: Path) -> ExecutionPlan:
    """Read and verify a plan file.

    Raises:
        ValueError: The file is no plan, has another version, was changed by hand, or is damaged.
        OSError: The file cannot be read.
    """
    try:
        values = read_json(path)
    except JsonError as error:
        raise ValueError(f"plan {error}; make it again: sppo solve") from None
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
    if digest != digest_of(values):
        raise ValueError(
            f"plan {path} was changed by hand or damaged: its content does not match its digest; "
            "make it again with sppo solve"
        )
    return plan


def check_program(plan: ExecutionPlan) -> None:
    """Raise ValueError if the program made here differs from the one that the plan was made for.

    Other versions of SPPO or numpy, or another kind of CPU, may make another program.

    Raises:
        ValueError: The digests differ; the message gives both and says what to do.
    """
    digest = plan.program().digest()
    if digest != plan.program_digest:
        raise ValueError(
            f"the plan is for a program with digest {plan.program_digest[:12]}, and here it makes "
            f"one with {digest[:12]}: another version of SPPO or numpy, or another kind of CPU, "
            "made it. Make it again with sppo solve"
        )


def planned_part(run: RunConfig) -> dict[str, Any]:
    """Return the keys of `run` that a plan holds, by section, as plain JSON values."""
    planned = run.model_dump(mode="json", include=_PLANNED_KEYS, exclude=_EXCEPT)
    if run.optimizer.moments != "fp32":  # else as in plans of versions without the key
        planned["optimizer"] = {"moments": run.optimizer.moments}
    if run.adapter is not None:
        planned["adapter"] = run.adapter.model_dump(mode="json", exclude={"from_peft"})
    if run.train.only is not None:
        planned["train"]["only"] = list(run.train.only)
    if run.data.label_share is not None:
        planned["data"]["label_share"] = run.data.label_share
    return planned


def check_plan_fits(plan: ExecutionPlan, run: RunConfig) -> None:
    """Raise ValueError if `plan` was made for another run.

    Models are compared by shape, so a plan for a preset also fits weights of the same shape. A plan
    fits whatever share of labels counts.

    Raises:
        ValueError: The plan does not match; the message names every differing key with both values.
    """
    planned, now = plan.run, planned_part(run)
    differences = list(_differences(_compared(planned), _compared(now)))
    if differences:
        raise ValueError(
            f"the plan was made for another run: {'; '.join(differences)}. Make it again with "
            "sppo solve, or undo the change"
        )


def _compared(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `keys` without those that a run may change: its model's name, its share of labels."""
    model = {key: value for key, value in keys["model"].items() if key not in _NOT_OF_THE_SHAPE}
    if model.get("position") != "learned":  # no table of positions
        model.pop("max_positions", None)
    data = {key: value for key, value in keys["data"].items() if key != "label_share"}
    return {**keys, "model": model, "data": data}


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
