"""Plan of one step of samples: sequences, program, placements, and predictions."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.cost.layer import UNCORRECTED
from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.stages.executed_flops import executed_flops
from sppo.planning.elastic.packing import PADDING, PackedSamples
from sppo.planning.elastic.step_correction import StepCorrection
from sppo.planning.make_plan import compute_seconds, stage_plans
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Packed samples of one replica in one step, the candidate that runs them, and predictions.

    Attributes:
        packed: Packed samples.
        evaluated: Chosen candidate.
        replicas: Samples of each replica, as indices among the samples of the step.
        correction: Correction of the predictions; None if they are not corrected.
    """

    packed: PackedSamples
    evaluated: EvaluatedCandidate
    replicas: tuple[tuple[int, ...], ...] = ()
    correction: StepCorrection | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples of the step, without padding."""
        return sum(index != PADDING for samples in self.packed.samples for index in samples)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences, including padding."""
        return sum(sequence.tokens for sequence in self.sequences)

    @property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """Sequences that the samples are packed into."""
        return self.packed.sequences

    @cached_property
    def program(self) -> Schedule:
        """Program of the step."""
        return self.evaluated.executed_program()

    @cached_property
    def digest(self) -> str:
        """Digest of program, packing and placements, which must be equal on all ranks."""
        content = repr((self.program.digest(), self.packed.samples, self.placements))
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def placements(self) -> tuple[tuple[tuple[SubsequencePlacement, ...], ...], ...]:
        """Placement of each subsequence, [stages][sequences][subsequences]."""
        sequences = self.evaluated.candidate.distinct_sequences
        return tuple(
            tuple(stage.subsequences[own] for own in sequences)
            for stage in stage_plans(self.evaluated)
        )

    @property
    def step_s(self) -> float:
        """Simulated seconds of the step, including the update."""
        return self.evaluated.step_s

    @property
    def executed_flops(self) -> int:
        """FLOPs that the step executes if all labels count, including recomputation."""
        return executed_flops(self.evaluated.candidate, self.evaluated.placement)

    @property
    def bubble_fraction(self) -> float:
        """Simulated idle share of all pipeline ranks."""
        return self.evaluated.simulated.bubble_fraction

    @property
    def device_peak_bytes(self) -> int:
        """Simulated memory of the fullest device."""
        return max(self.evaluated.simulated_bytes)

    @cached_property
    def kinds(self) -> Counter[str]:
        """Number of subsequences by kind.

        "split" is one slice of a long sample, "batched" are short samples alone, and "hybrid" is
        the tail of a long sample beside short samples.
        """
        kinds: Counter[str] = Counter()
        for sequence in self.sequences:
            for parts in sequence.parts():
                cut = parts[0][0] > 0 or len(sequence.lengths) > 1
                kinds["batched" if not cut else "hybrid" if len(parts) > 1 else "split"] += 1
        return kinds

    @cached_property
    def uncorrected(self) -> EvaluatedCandidate:
        """Chosen candidate with uncorrected costs, even if it was planned with corrected ones."""
        return self._priced(None)

    @property
    def uncorrected_actions_s(self) -> float:
        """Uncorrected seconds from the first action of the program to the last."""
        return self.uncorrected.step_s - self.uncorrected.time.update_s

    @cached_property
    def predicted_s(self) -> float:
        """Predicted seconds of the step, corrected."""
        corrected, correction = self._corrected, self.correction
        if correction is None:
            return corrected.step_s
        actions_s = corrected.step_s - corrected.time.update_s
        return actions_s * correction.waiting + correction.rest_s

    @property
    def phases_s(self) -> tuple[float, float, float]:
        """Predicted seconds of forwards and of backwards of the busiest rank, and of the rest."""
        correction = self.correction
        rest_s = self._corrected.time.update_s if correction is None else correction.rest_s
        return (*compute_seconds(self._corrected), rest_s)

    @cached_property
    def _corrected(self) -> EvaluatedCandidate:
        """Chosen candidate with corrected costs."""
        return self._priced(self.correction)

    def _priced(self, correction: StepCorrection | None) -> EvaluatedCandidate:
        """Return the candidate priced with a correction, with its placement unchanged."""
        compute = UNCORRECTED if correction is None else correction.compute
        workload = self.evaluated.candidate.workload
        if workload.correction == compute:
            return self.evaluated
        workload = replace(workload, correction=compute)
        return replace(
            self.evaluated, candidate=replace(self.evaluated.candidate, workload=workload)
        )
