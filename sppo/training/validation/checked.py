"""Sets of a run that passed all checks before the start, and the plan of their validations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sppo.config.validation import ValidationConfig
from sppo.data.evaluated_sets import set_key
from sppo.data.sample_rows import TrainingData
from sppo.data.tokens import open_tokens
from sppo.planning.plan import ExecutionPlan
from sppo.planning.validation_plan import SetSamples, ValidationPlan, plan_validation, run_of_set
from sppo.training.job import Job, token_facts
from sppo.training.validation.evaluate import EvaluatedSet


@dataclass(frozen=True, slots=True, eq=False)
class CheckedValidation:
    """Validation of a run that passed all checks."""

    config: ValidationConfig
    plan: ValidationPlan
    sets: tuple[EvaluatedSet, ...]
    num_labels: Mapping[str, int]
    """Number of labels of each set."""

    @property
    def watched(self) -> tuple[str, str]:
        """Name of the watched set, and what is watched of it: loss, accuracy or exact."""
        return self.config.watched(self.sets[0].plan.name)


def check_validation(job: Job, plan: ExecutionPlan) -> CheckedValidation | None:
    """Open the sets of a run's validation, and plan them; None if it has none. Collective.

    Args:
        job: Job that trains the run.
        plan: Plan of the steps.

    Raises:
        ValueError: A set cannot be opened, has no label that counts, or is not the same on all
            ranks.
        MemoryError: A set does not fit.
    """
    run, peers = job.run, job.peers
    if run.validation is None:
        return None
    opened = peers.done_by_all(
        lambda: {
            name: TrainingData.of(run_of_set(run, own), open_tokens(Path(own.tokens)))
            for name, own in run.evaluated_sets.items()
        }
    )
    facts: dict[str, str] = {}
    for name, samples in opened.items():
        facts |= token_facts(set_key(name), samples.sources[0])
    if job.mesh.is_distributed:
        peers.check_same(facts)
    planned, num_labels = peers.decided_by_main(lambda: _planned(job, plan, opened))
    sets = (
        EvaluatedSet.of(run_of_set(run, run.evaluated_sets[own.name]), opened[own.name], own)
        for own in planned.sets
    )
    return CheckedValidation(run.validation, planned, tuple(sets), num_labels)


def _planned(
    job: Job, plan: ExecutionPlan, opened: Mapping[str, TrainingData]
) -> tuple[ValidationPlan, dict[str, int]]:
    """Return the plan of the validations, and the number of labels of each set.

    Raises:
        ValueError: A set has no label that counts.
        MemoryError: A set does not fit.
    """
    run, evaluated = job.run, {}
    for name, samples in opened.items():
        count = run.evaluated_sets[name].sequences
        first = range(min(samples.num_samples, count or samples.num_samples))
        num_labels = samples.num_labels(first)
        if not num_labels:
            raise ValueError(
                f"validation.sets.{name}: no label of its first {len(first)} "
                f"{samples.table.noun}s counts; raise sequences, or take the set out"
            )
        evaluated[name] = SetSamples(samples.lengths(first), num_labels)
    found = plan_validation(
        run,
        candidate=plan.candidate(),
        training=plan.rank_memory,
        step_s=plan.predicted.step_s,
        samples=evaluated,
    )
    if found.problem is not None:
        raise MemoryError(found.problem)
    return found, {name: own.num_labels for name, own in evaluated.items()}
