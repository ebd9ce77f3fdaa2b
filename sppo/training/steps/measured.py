"""Measurements of the steps of a run on one rank: seconds by phase, and memory by bucket."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.memory.process_growth import POOL_FREE_BYTES
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.engine import EnginePeaks
from sppo.training.devices.pool_use import PoolUse
from sppo.training.state import TrainingState


@dataclass(frozen=True, slots=True)
class StepPhases:
    """Seconds of one step by phase, predicted or measured."""

    forward_s: float
    backward_s: float
    rest_s: float
    """Seconds for reading data, reducing gradients over ranks, clipping and the update."""


@dataclass(slots=True)
class MeasuredBuckets:
    """Peaks of device memory in bytes, by memory bucket."""

    weights_bytes: int = 0
    """Bytes of the weights that stay on the device, and of weights gathered while in use."""
    gradients_bytes: int = 0
    """Bytes of the gradients that stay on the device, and of whole gradients until reduced."""
    optimizer_bytes: int = 0
    kv_bytes: int = 0
    activations_bytes: int = 0
    copies_bytes: int = 0
    """Bytes of the slots that offloaded tensors pass through."""
    kept_weights_bytes: int = 0
    """Bytes of the weights that stay on the device."""
    kept_gradients_bytes: int = 0
    """Bytes of the gradients that stay on the device."""
    working_bytes: int | None = None
    """Bytes of the working set; None if tensors are in the C heap, which does not count them."""
    free_bytes: int = 0
    """Bytes that the pool of the allocator has from the system beyond those of tensors."""

    @property
    def counted_bytes(self) -> int:
        """Sum of all buckets, in bytes."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        saved = self.kv_bytes + self.activations_bytes + self.copies_bytes
        return state + saved + (self.working_bytes or 0)

    def count_state(self, state: TrainingState) -> None:
        """Count the weights, gradients and optimizer states that stay on the device."""
        weights, gradients, self.optimizer_bytes = state.tensors.device_bytes
        self.kept_weights_bytes = self.weights_bytes = weights
        self.kept_gradients_bytes = self.gradients_bytes = gradients

    def count_step(self, peaks: EnginePeaks, *, copies_bytes: int, pool: PoolUse | None) -> None:
        """Raise the peaks of the buckets to those of one step.

        Args:
            peaks: Peaks that the engine counted.
            copies_bytes: Bytes of the slots on the device.
            pool: Use of the allocator's pool at the end of the step. The working set is its peak
                less its use at the end and less the bytes that the engine counts. None if the
                allocator does not count its use.
        """
        weights = self.kept_weights_bytes + peaks.gathered_bytes
        self.weights_bytes = max(self.weights_bytes, weights)
        gradients = self.kept_gradients_bytes + peaks.whole_gradients_bytes
        self.gradients_bytes = max(self.gradients_bytes, gradients)
        self.kv_bytes = max(self.kv_bytes, peaks.kv_bytes)
        self.activations_bytes = max(self.activations_bytes, peaks.activations_bytes)
        self.copies_bytes = max(self.copies_bytes, copies_bytes)
        if pool is not None:
            counted = peaks.pooled_activations_bytes + peaks.gathered_bytes
            counted += peaks.whole_gradients_bytes
            working = pool.used_peak_bytes - pool.used_bytes - counted
            self.working_bytes = max(self.working_bytes or 0, working)
            if pool.resident_peak_bytes is not None:
                free = pool.resident_peak_bytes - pool.used_peak_bytes
                self.free_bytes = max(self.free_bytes, free)


def predicted_and_measured(
    predicted: MemoryBuckets, measured: MeasuredBuckets, *, all_bytes: int
) -> dict[str, tuple[int, int]]:
    """Return (predicted, measured) bytes by bucket, as far as the device can separate buckets.

    Args:
        predicted: Predicted memory buckets.
        measured: Peaks of the buckets over all steps.
        all_bytes: Peak memory of the process, less what it held before it trained, and less pages
            of libraries, which the system shares and can drop.
    """
    if measured.working_bytes is None:
        rest = {
            "working set and heap": (
                predicted.working_bytes
                + predicted.communication_bytes
                + predicted.heap_bytes
                + predicted.growth_bytes,
                max(0, all_bytes - measured.counted_bytes),
            )
        }
    else:
        # The plan counts an allowance for free memory of a pool as growth of the process.
        allowance = POOL_FREE_BYTES if measured.free_bytes else 0
        free = {"free in the pool": (allowance, measured.free_bytes)} if allowance else {}
        rest = {
            # Buffers of messages and exchanged tensors cannot be separated from it.
            "working set": (
                predicted.working_bytes + predicted.communication_bytes,
                measured.working_bytes,
            ),
            "process growth": (
                predicted.growth_bytes + predicted.heap_bytes - allowance,
                # Negative where the system took back pages that count as held in a bucket.
                max(0, all_bytes - measured.counted_bytes - measured.free_bytes),
            ),
            **free,
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
        # Torch does not count the memory that NCCL allocates.
        "all": (predicted.total_bytes - predicted.communicators_bytes, all_bytes),
    }
