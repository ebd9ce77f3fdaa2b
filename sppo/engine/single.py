"""The engine of one rank: every layer in one stage, sequences cut and run by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.engine.executor import Executor, StepOutput
from sppo.engine.stage import Stage
from sppo.engine.unit import SequenceData, Unit, units_of
from sppo.kernels.attention import Backend
from sppo.offload.copy_report import CopyReport
from sppo.offload.moving_store import MovingStore
from sppo.offload.stack_store import StackStore
from sppo.offload.store import ActivationStore, ResidentStore
from sppo.planning.partition import lengths_of
from sppo.planning.row_plan import PolicyRows, RowPlan
from sppo.schedule.actions import ActionKind
from sppo.schedule.generators import generate


def _go_on() -> None:
    """Nothing stands between one action and the next."""


@dataclass(frozen=True, slots=True)
class EnginePeaks:
    """Most bytes held at once, by bucket, since the last :meth:`SingleRankEngine.take_peaks`."""

    activations_bytes: int
    """Saved tensors of the layers, and the gradient of the last one's output."""
    kv_bytes: int
    """K, V and their fp32 gradients."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """One step's loss and where its time went."""

    total_loss: Tensor
    """Sum of the token losses, a float64 scalar."""
    num_valid: int
    """Labels it sums over."""
    forward_s: float
    backward_s: float


class SingleRankEngine:
    """Forward and backward of whole sequences, subsequence by subsequence.

    Args:
        model: the shape.
        weights: all parameters by global name, in the compute dtype.
        gradients: fp32 (float64) buffers by global name, added to; None evaluates only.
        policy: activation policy, see :mod:`sppo.planning.activation_policy`.
        rows: what to keep, move and rebuild instead.
        moved: where moved tensors go; closed with the engine.
        input_every: layers that share one saved input, see :class:`sppo.engine.stage.Stage`.
        attention_backend: of :func:`sppo.kernels.attention.attention_forward`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor] | None,
        policy: str = "retain",
        rows: RowPlan | None = None,
        moved: MovingStore | None = None,
        input_every: int = 1,
        attention_backend: Backend = "auto",
    ) -> None:
        on_cpu = next(iter(weights.values())).device.type == "cpu"
        self._store: ActivationStore = StackStore() if on_cpu else ResidentStore()
        self._moved = moved
        self._stage = Stage(
            model,
            weights=weights,
            gradients=gradients,
            activations=self._store,
            rows=rows or PolicyRows(policy),
            moved=moved,
            input_every=input_every,
            attention_backend=attention_backend,
        )

    @torch.no_grad()
    def accumulate(
        self,
        sequences: Sequence[SequenceData],
        boundaries: Sequence[Sequence[int]],
        *,
        before_action: Callable[[], None] = _go_on,
    ) -> Accumulated:
        """Add the gradient of the mean loss over all valid labels of ``sequences``.

        Args:
            sequences: the step's sequences, of any lengths.
            boundaries: cuts of each sequence, from 0 to its length.
            before_action: called before every action; what it raises gives the step up cleanly.

        Raises:
            ValueError: no label is valid, or boundaries that do not tile a sequence.
        """
        num_valid = sum(data.num_valid for data in sequences)
        if num_valid == 0:
            raise ValueError("none of the step's labels is valid: there is nothing to learn from")
        output = self._run(
            sequences, boundaries, loss_scale=1.0 / num_valid, before_action=before_action
        )
        losses = [loss.double().sum() for loss in output.token_losses.values()]
        return Accumulated(
            torch.stack(losses).sum(),
            num_valid,
            forward_s=output.seconds[ActionKind.F],
            backward_s=output.seconds[ActionKind.B],
        )

    @torch.no_grad()
    def evaluate(self, data: SequenceData, boundaries: Sequence[int]) -> Tensor:
        """Loss of each token of one sequence, ``[S]``; 0 where the label is ignored."""
        losses = self._run([data], [boundaries], loss_scale=None).token_losses
        return torch.cat([losses[key] for key in sorted(losses)])

    def take_peaks(self) -> EnginePeaks:
        """Peaks since the last call; starts counting anew."""
        kv = self._stage.kv
        peaks = EnginePeaks(self._store.peak_bytes, kv.peak_bytes)
        self._store.peak_bytes = self._store.device_bytes
        kv.peak_bytes = kv.device_bytes
        return peaks

    def take_copies(self) -> CopyReport:
        """What was moved since the last call."""
        return CopyReport() if self._moved is None else self._moved.take_report()

    def close(self) -> None:
        """Give back what moved tensors took: threads, memory, file. Twice is once."""
        if self._moved is not None:
            self._moved.close()

    def _run(
        self,
        sequences: Sequence[SequenceData],
        boundaries: Sequence[Sequence[int]],
        *,
        loss_scale: float | None,
        before_action: Callable[[], None] = _go_on,
    ) -> StepOutput:
        units: dict[tuple[int, int], Unit] = {}
        for index, (data, cuts) in enumerate(zip(sequences, boundaries, strict=True)):
            units |= units_of(index, data, cuts)
        schedule = generate(
            "sppo",
            num_ranks=1,
            lengths=tuple(lengths_of(tuple(cuts)) for cuts in boundaries),
            forward_only=loss_scale is None,
        )
        if loss_scale is not None:
            backwards = [a.unit for a in schedule.programs[0] if a.kind is ActionKind.B]
            self._stage.prepare(units, backward_order=backwards)
        executor = Executor(schedule, rank=0, stages={0: self._stage})
        return executor.run(units, loss_scale=loss_scale, before_action=before_action)
