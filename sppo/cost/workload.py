"""Workload: the model, machine, precision and sequence parallelism that all costs depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from sppo.config.model import ModelConfig
from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.hardware.description import HardwareSpec

Mechanism = Literal["ulysses", "megatron"]

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
ACCUMULATION_BYTES = 4
"""Bytes of an element of masters, gradients and dK/dV, which are fp32."""
NUM_MOMENTS = 2
"""Moments of AdamW."""


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """Factors of the predicted compute seconds of forwards and backwards.

    Forwards and backwards have separate corrections: their kernels and memory traffic differ, and a
    run times both on any device, action by action. Kernels inside an action cannot be timed without
    slowing the action down, so they are not corrected one by one.

    Attributes:
        forward: Factor of forwards, including the head.
        backward: Factor of both halves of backwards and of recomputation.
    """

    forward: float = 1.0
    backward: float = 1.0

    def __post_init__(self) -> None:
        if not (self.forward > 0 and self.backward > 0):
            raise ValueError(
                f"correction of forwards by {self.forward} and of backwards by {self.backward}: "
                "both must be above 0"
            )


UNCORRECTED = CostCorrection()


@dataclass(frozen=True)
class Workload:
    """Model, machine, dtype and sequence parallelism: the inputs of the cost of one layer.

    Attributes:
        model: Shape of the model.
        hardware: Machine of the run.
        dtype: Compute dtype, "bf16" or "fp32".
        sequence_parallel_degree: Devices of a sequence-parallel group (g).
        sequence_parallel: Kind of sequence parallelism.
        vocabulary_sharded: Whether a Megatron group also shards embedding and head, as Megatron-LM
            does; in this trainer each device has them whole.
        correction: Correction of compute seconds by measured steps of a run.
        moments: Precision of the optimizer's moments, "bf16" or "fp32".
        label_share: Share of the tokens whose label counts, which alone the head computes.
        trainable: Parameters that train, and the factors of adapters.
    """

    model: ModelConfig
    hardware: HardwareSpec
    dtype: str = "bf16"
    sequence_parallel_degree: int = 1
    sequence_parallel: Mechanism = "ulysses"
    vocabulary_sharded: bool = False
    correction: CostCorrection = UNCORRECTED
    moments: str = "fp32"
    label_share: float = 1.0
    trainable: Trainable = EVERYTHING

    @property
    def moments_bytes(self) -> int:
        """Bytes of both moments of a parameter."""
        return NUM_MOMENTS * ELEMENT_BYTES[self.moments]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def hidden_row_bytes(self) -> int:
        """Bytes of a token in the residual stream."""
        return self.model.hidden_size * self.element_bytes

    def __hash__(self) -> int:
        """Return the hash of all attributes, computed once because caches need it often."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the hash: hashes of strings differ between processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}
