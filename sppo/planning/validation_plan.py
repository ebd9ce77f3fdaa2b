"""Plan of a validation: cuts, time and memory of its sets on the layout of a run's steps.

A set is evaluated with the degrees, the schedule and the tiers of a step. Its sequences are cut as
those of a step if they are as long, and otherwise into subsequences about as long. Rows of a set
run together where one alone would leave pipeline ranks idle, as many as fit into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from sppo.config.run import RunConfig
from sppo.config.validation import ValidationSet
from sppo.cost.candidate import Candidate
from sppo.cost.flops import partition_costs
from sppo.cost.forward_only import evaluation_program, forward_costs, forward_memory
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory, bucket_label
from sppo.planning.evaluated_rows import rows_of
from sppo.planning.longest_sequence import longest_tokens
from sppo.planning.partition import boundaries_of, lengths_of
from sppo.planning.search.choices import cut_sequence
from sppo.schedule.orders.names import WHOLE_SEQUENCES, order_of
from sppo.schedule.simulation.simulate import simulate
from sppo.units import counted, format_bytes

_UNITS_PER_RANK = 8
"""Subsequences that run together for each pipeline rank, at least, if there are as many."""


@dataclass(frozen=True, slots=True, eq=False)
class SetSamples:
    """Lengths and labels of the samples of a set that are evaluated."""

    lengths: Sequence[int]
    """Tokens of each sequence, or sample."""
    num_labels: int
    """Number of labels that count."""

    @property
    def label_share(self) -> float:
        """Fraction of the tokens whose label counts, which alone the head computes."""
        return max(1, self.num_labels) / sum(self.lengths)


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Plan of the evaluation of one set."""

    name: str
    boundaries: tuple[int, ...]
    """Boundaries of the subsequences of a sequence of full length."""
    num_samples: int
    """Number of sequences, or samples, that are evaluated."""
    at_once: int
    """Rows of a replica that run together."""
    round_s: float
    """Predicted seconds of the longest rows that run together."""
    seconds: float
    """Predicted seconds of the whole set."""
    memory: tuple[MemoryBuckets, ...]
    """Predicted memory of one device of each pipeline rank."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest device."""
        return max(rank.total_bytes for rank in self.memory)

    def too_large(self, room_bytes: int) -> str:
        """Return what a sequence needs, and what there is, as text."""
        fullest = max(self.memory, key=lambda rank: rank.total_bytes)
        label, held = bucket_label(fullest.largest), getattr(fullest, fullest.largest)
        return (
            f"a sequence of {self.boundaries[-1]} tokens needs {format_bytes(self.peak_bytes)} "
            f"(most of it {label}: {format_bytes(held)}), and {format_bytes(room_bytes)} may be "
            "used"
        )


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """Plan of the validations of a run."""

    sets: tuple[SetPlan, ...]
    every: int
    """Number of steps from one validation to the next."""
    step_s: float
    """Predicted seconds of a step."""
    room_bytes: int
    """Memory of a device that may be filled."""
    problem: str | None = None
    """Why a set does not fit, and what would; None if all fit."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of one validation."""
        return sum(own.seconds for own in self.sets)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest device in a validation."""
        return max(own.peak_bytes for own in self.sets)

    @property
    def share(self) -> float:
        """Fraction of the time of a run that its validations take."""
        return self.seconds / (self.every * self.step_s + self.seconds)

    def text(self) -> str:
        """Return the size, time and memory of the validations on one line."""
        count = counted(sum(own.num_samples for own in self.sets), "sequence")
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        if self.problem is not None:
            return f"{count} {steps}: does not fit: {self.problem}"
        room = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.room_bytes)}"
        return f"{count} {steps}, {self.share:.1%} of the time, {room}"


def run_of_set(run: RunConfig, own: ValidationSet) -> RunConfig:
    """Return the run with the tokens, the samples and the length of a set."""
    samples, length = own.samples or run.data.samples, own.length or run.sequence.length
    values: dict[str, object] = {
        "data.tokens": own.tokens,
        "data.sources": None,
        "data.samples": samples,
    }
    if length != run.sequence.length or samples == "documents":
        values |= {"sequence.length": length, "sequence.boundaries": None}
    if samples == "documents":
        values |= {"train.samples_per_step": 1, "train.tokens_per_step": None}
    else:
        values["sequence.longer"] = "cut"
    return run.with_values(values)


def set_boundaries(run: RunConfig, *, candidate: Candidate) -> tuple[int, ...]:
    """Return the cuts of a sequence of a set.

    Args:
        run: Run of the set, of :func:`run_of_set`.
        candidate: Candidate of the steps.
    """
    length, trained = run.sequence.length, sum(candidate.lengths)
    if length == trained:
        return boundaries_of(candidate.lengths)
    if candidate.schedule in WHOLE_SEQUENCES:
        return (0, length)
    lengths = cut_sequence(
        run,
        num_subsequences=ceil(length * len(candidate.lengths) / trained),
        num_stages=candidate.pipeline_parallel_degree,
    )
    return boundaries_of(lengths)


def plan_validation(
    run: RunConfig,
    *,
    candidate: Candidate,
    training: Sequence[StageMemory],
    step_s: float,
    samples: Mapping[str, SetSamples],
) -> ValidationPlan:
    """Return the plan of the validations of a run.

    Args:
        run: Validated run configuration with a validation.
        candidate: Candidate of a step of the run.
        training: Memory of each pipeline rank in such a step.
        step_s: Predicted seconds of the step.
        samples: What is evaluated, by set.
    """
    assert run.validation is not None, "asked for only with a validation"
    most = max(rank.device.total_bytes for rank in training)
    room_bytes = max(candidate.budget_bytes, most)
    planned, problem = [], None
    for name, own in run.evaluated_sets.items():
        workload = replace(candidate.workload, label_share=samples[name].label_share)
        of_set = SetPlanner(
            run_of_set(run, own), step=replace(candidate, workload=workload), training=training
        )
        found = of_set.plan(name, samples[name].lengths, room_bytes=room_bytes)
        planned.append(found)
        if found.peak_bytes > room_bytes and problem is None:
            longest = of_set.longest(found, room_bytes=room_bytes)
            fix = f"write length: {longest}" if longest else "train on more devices"
            text = found.too_large(room_bytes)
            problem = f"validation.sets.{name}: {text}; {fix}, or take the set out"
    return ValidationPlan(tuple(planned), run.validation.every, step_s, room_bytes, problem)


class SetPlanner:
    """Planning of one set.

    Args:
        run: Run of the set.
        step: Candidate of a step, as it is trained.
        training: Memory of each pipeline rank in a step.
    """

    def __init__(self, run: RunConfig, *, step: Candidate, training: Sequence[StageMemory]) -> None:
        self._run, self._step, self._training = run, step, training
        self._layout = replace(
            step,
            # An order that cuts no units.
            schedule=order_of(step.schedule, num_virtual=step.virtual_stages),
            packed=(),
            forwards_before_backward=(),
            kv="retained",
            kv_recomputed=0,
        )

    def plan(self, name: str, samples: Sequence[int], *, room_bytes: int) -> SetPlan:
        """Return the plan of the set, of which as many rows run together as fit."""
        boundaries = set_boundaries(self._run, candidate=self._step)
        packs = self._run.data.samples == "documents"
        degree = self._layout.workload.sequence_parallel_degree
        rows = [*rows_of(samples, boundaries=boundaries, packs=packs, degree=degree)]
        longest = lengths_of(max((row.boundaries for row in rows), key=lambda cuts: cuts[-1]))
        of_replica = ceil(len(rows) / self._layout.data_parallel_degree)
        ranks = self._layout.pipeline_parallel_degree
        at_once = min(ranks, of_replica, ceil(_UNITS_PER_RANK * ranks / len(longest)))
        while True:
            memory = self._memory(longest, at_once)
            if at_once == 1 or max(rank.total_bytes for rank in memory) <= room_bytes:
                break
            at_once //= 2
        round_s = self._seconds(longest, at_once)
        if packs:
            seconds = round_s / at_once * self._work(samples) / self._work([sum(longest)])
            seconds /= self._layout.data_parallel_degree
        else:
            rounds, rest = divmod(of_replica, at_once)
            seconds = rounds * round_s + (self._seconds(longest, rest) if rest else 0.0)
        return SetPlan(name, boundaries, len(samples), at_once, round_s, seconds, memory)

    def longest(self, planned: SetPlan, *, room_bytes: int) -> int:
        """Return the longest length that fits, at most that of the plan; 0 if none does."""
        return longest_tokens(
            lambda tokens: self._fits(tokens, room_bytes=room_bytes), most=planned.boundaries[-1]
        )

    def _fits(self, tokens: int, *, room_bytes: int) -> bool:
        run = self._run.with_values({"sequence.length": tokens, "sequence.boundaries": None})
        lengths = lengths_of(set_boundaries(run, candidate=self._step))
        return max(rank.total_bytes for rank in self._memory(lengths, 1)) <= room_bytes

    def _work(self, samples: Sequence[int]) -> float:
        """Return the relative work of samples, each by itself."""
        linear, quadratic = partition_costs(self._run.model)
        tokens = np.asarray(samples, dtype=np.float64)
        return float((linear * tokens + quadratic * tokens**2 / 2).sum())

    def _memory(self, lengths: tuple[int, ...], rows: int) -> tuple[MemoryBuckets, ...]:
        candidate = replace(self._layout, lengths=lengths, sequences=rows)
        return forward_memory(candidate, training=self._training)

    def _seconds(self, lengths: tuple[int, ...], rows: int) -> float:
        candidate = replace(self._layout, lengths=lengths, sequences=rows)
        return simulate(evaluation_program(candidate), costs=forward_costs(candidate)).makespan_s
