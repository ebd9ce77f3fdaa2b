"""Measurements of the steps of a run on one rank: where time went, and what held memory."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.engine import EnginePeaks
from sppo.offload.copy_report import CopyReport
from sppo.training.devices.device import PoolUse
from sppo.training.state import TrainingState


@dataclass(frozen=True, slots=True)
class StepPhases:
    """Seconds of one step by phase."""

    forward_s: float
    backward_s: float
    rest_s: float
    """Reading data, adding gradients up over ranks, clipping, the update."""


@dataclass(slots=True)
class MeasuredBuckets:
    """Bytes that were held, at most, by what held them."""

    weights_bytes: int = 0
    """Weights that a rank keeps, and those it puts together for the time it computes with them."""
    gradients_bytes: int = 0
    """Gradients that a rank keeps, and those that are whole while they are formed and reduced."""
    optimizer_bytes: int = 0
    kv_bytes: int = 0
    activations_bytes: int = 0
    copies_bytes: int = 0
    """Slots that offloaded tensors pass through."""
    kept_weights_bytes: int = 0
    """Bytes of the weights that are on the device all the time."""
    kept_gradients_bytes: int = 0
    """Bytes of the gradients that are on the device all the time."""
    working_bytes: int | None = None
    """None where torch's tensors live in the C heap, which does not tell."""

    @property
    def counted_bytes(self) -> int:
        """Return all bytes that are counted tensor by tensor."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        saved = self.kv_bytes + self.activations_bytes + self.copies_bytes
        return state + saved + (self.working_bytes or 0)

    def count_state(self, state: TrainingState) -> None:
        """Take in what does not change from step to step."""
        weights, gradients, self.optimizer_bytes = state.tensors.device_bytes
        self.kept_weights_bytes = self.weights_bytes = weights
        self.kept_gradients_bytes = self.gradients_bytes = gradients

    def count_step(self, peaks: EnginePeaks, *, pool: PoolUse | None) -> None:
        """Take in the peaks of one step.

        Args:
            peaks: of the engine.
            pool: of torch's memory at the end of the step; what its peak has beyond that and what
                the engine counts is the working set. None where nobody counts it.
        """
        weights = self.kept_weights_bytes + peaks.gathered_bytes
        self.weights_bytes = max(self.weights_bytes, weights)
        gradients = self.kept_gradients_bytes + peaks.whole_gradients_bytes
        self.gradients_bytes = max(self.gradients_bytes, gradients)
        self.kv_bytes = max(self.kv_bytes, peaks.kv_bytes)
        self.activations_bytes = max(self.activations_bytes, peaks.activations_bytes)
        if pool is not None:
            counted = peaks.pooled_activations_bytes + peaks.gathered_bytes
            counted += peaks.whole_gradients_bytes
            working = pool.used_peak_bytes - pool.used_bytes - counted
            self.working_bytes = max(self.working_bytes or 0, working)

    def count_copies(self, copies: CopyReport, *, host_is_device: bool) -> None:
        """Take in the device memory that one step's copies passed through.

        Args:
            copies: of the step.
            host_is_device: host memory is the device's own, as on a CPU.
        """
        passed = copies.ring_bytes + (copies.host_bytes if host_is_device else 0)
        self.copies_bytes = max(self.copies_bytes, passed)


def predicted_and_measured(
    predicted: MemoryBuckets, measured: MeasuredBuckets, *, all_bytes: int
) -> dict[str, tuple[int, int]]:
    """Return pairs of bytes by bucket, as far as the device tells them apart.

    Args:
        predicted: of the plan.
        measured: of the steps.
        all_bytes: what the process held at most, beyond what it held before it trained.
    """
    if measured.working_bytes is None:
        rest = {
            "working set and heap": (
                predicted.working_bytes + predicted.heap_bytes + predicted.growth_bytes,
                all_bytes - measured.counted_bytes,
            )
        }
    else:
        rest = {
            # What messages and exchanged tensors take is not told apart from it.
            "working set": (
                predicted.working_bytes + predicted.communication_bytes,
                measured.working_bytes,
            ),
            "process growth": (
                predicted.growth_bytes + predicted.heap_bytes,
                all_bytes - measured.counted_bytes,
            ),
        }
    copies = predicted.copies_bytes, measured.copies_bytes
    return {
        "weights": (predicted.weights_bytes, measured.weights_bytes),
        "gradients": (predicted.gradients_bytes, measured.gradients_bytes),
        "optimizer": (predicted.optimizer_bytes, measured.optimizer_bytes),
        "K/V and gradients": (predicted.kv_bytes + predicted.kv_gradients_bytes, measured.kv_bytes),
        "activations": (
            predicted.activations_bytes + predicted.loss_gradient_bytes,
            measured.activations_bytes,
        ),
        **({"copies": copies} if any(copies) else {}),
        **rest,
        "all": (predicted.total_bytes, all_bytes),
    }
