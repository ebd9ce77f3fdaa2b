"""Cache of the candidates of one division of devices and layers, and of their evaluations."""

from __future__ import annotations

from dataclasses import replace

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import StageSeconds, stage_seconds
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.candidates import candidate_of_subsequences
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.memory_bounds import leaves_room
from sppo.planning.search.simulated_candidate import simulated_if_inexact


class CandidateCache:
    """Cache of the candidates of one division of devices and layers, and of their evaluations.

    Candidates are looked up by N; each is made and evaluated once.
    """

    def __init__(
        self, run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees, virtual_stages: int
    ) -> None:
        self._run, self._degrees = run, degrees
        self.hardware, self.virtual_stages = hardware, virtual_stages
        self._candidates: dict[int, Candidate] = {}
        self._seconds: dict[int, StageSeconds] = {}
        self._evaluated: dict[tuple[int, str], EvaluatedCandidate] = {}

    def candidate(self, num_subsequences: int) -> Candidate:
        """Return the candidate with `num_subsequences` subsequences."""
        if num_subsequences not in self._candidates:
            self._candidates[num_subsequences] = candidate_of_subsequences(
                self._run,
                hardware=self.hardware,
                degrees=self._degrees,
                num_subsequences=num_subsequences,
                virtual_stages=self.virtual_stages,
            )
        return self._candidates[num_subsequences]

    def seconds(self, num_subsequences: int) -> StageSeconds:
        """Return the seconds of the candidate's units with everything retained."""
        if num_subsequences not in self._seconds:
            self._seconds[num_subsequences] = stage_seconds(self.candidate(num_subsequences))
        return self._seconds[num_subsequences]

    def evaluated(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the evaluated candidate with `num_subsequences` subsequences."""
        return self._evaluate(self.candidate(num_subsequences))

    def simulated_if_inexact(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the evaluated candidate, simulated if its closed form may be inexact.

        The candidate must fit.
        """
        evaluated = simulated_if_inexact(self.evaluated(num_subsequences))
        self._evaluated[num_subsequences, evaluated.candidate.schedule] = evaluated
        return evaluated

    def without_msp(self, num_subsequences: int) -> EvaluatedCandidate:
        """Return the evaluated candidate without cut units: under MSP, as if no unit were cut.

        Choosing the units to cut (MSP) takes a search. The closed form of the time and the memory
        without saved activations are the same with and without cut units.
        """
        return self._evaluate(self._candidate_without_msp(num_subsequences))

    def fits(self, num_subsequences: int) -> bool:
        """Return whether the candidate fits without cut units (MSP)."""
        return self.without_msp(num_subsequences).shortfall is None

    def seems_to_fit(self, num_subsequences: int) -> bool:
        """Return whether it fits with whole units; True, too, if that takes long to tell."""
        if self.rules_out_fewer(num_subsequences, if_known=True):
            return False
        return leaves_room(self.candidate(num_subsequences)) or self.fits(num_subsequences)

    def rules_out_fewer(self, num_subsequences: int, *, if_known: bool = False) -> bool:
        """Return whether fewer subsequences cannot fit either, as device memory is short for these.

        Host memory of a fixed offload ratio grows with N, since the last subsequence is not
        offloaded, and what a rank holds under MSP depends on its program: False for these.

        Args:
            num_subsequences: Number of subsequences.
            if_known: Whether to return False instead of evaluating a candidate.
        """
        candidate = self.candidate(num_subsequences)
        key = num_subsequences, candidate.schedule
        if candidate.schedule == "sppo_msp" or (if_known and key not in self._evaluated):
            return False
        shortfall = self._evaluate(candidate).shortfall
        return shortfall is not None and shortfall.place == "device"

    def _candidate_without_msp(self, num_subsequences: int) -> Candidate:
        candidate = self.candidate(num_subsequences)
        cuts = candidate.schedule != candidate.order
        return replace(candidate, schedule=candidate.order) if cuts else candidate

    def _evaluate(self, candidate: Candidate) -> EvaluatedCandidate:
        num_subsequences = len(candidate.lengths)
        key = num_subsequences, candidate.schedule
        if key not in self._evaluated:
            self._evaluated[key] = evaluate_candidate(
                candidate, seconds=self.seconds(num_subsequences)
            )
        return self._evaluated[key]
