"""What of the tests ``scripts/test.sh`` leaves to ``scripts/test.sh --all``, and why it may.

The default tier meets every kind of thing that is tested: every schedule, policy, family of models,
back end, sequence parallelism, ZeRO level and axis of the mesh. What it leaves out are further
combinations of them and second runs of what another test shows. :data:`LEFT_OUT` is the whole
list. Of a test that stands there by :func:`each` or :func:`pairs` some cases stay in the default
tier, chosen by their parameters; of one by :func:`only` or :func:`without` those named; for one by
:func:`replaced` another test stands. ``tests/test_tiers.py`` checks the list.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest

default_tier = True
"""Whether pytest was asked for the default tier, which ``tests/conftest.py`` finds out."""


def examples(few: int, *, all: int) -> int:
    """Examples of a hypothesis test: ``few`` in the default tier, ``all`` with ``--all``."""
    return few if default_tier else all


def exhaustive(*values: Any) -> list[Any]:
    """Mark values of one parameter, whose cases are left to the exhaustive tier."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def default_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values of one parameter, all but ``kept`` left to the exhaustive tier."""
    return [value if value in kept else exhaustive(value)[0] for value in values]


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the values of several parameters.

    The default tier meets every value in one of as few cases as there are values of the longest
    axis; all other cases are left to the exhaustive tier.
    """
    lists = [list(axis) for axis in axes]
    lengths = [len(values) for values in lists]
    default = {tuple(i % length for length in lengths) for i in range(max(lengths))}
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, indices, strict=True)),
            marks=() if indices in default else pytest.mark.exhaustive,
        )
        for indices in itertools.product(*map(range, lengths))
    ]


OTHER_MARKS = ("gpu", "multigpu", "slow")
"""Marks of tests that are in no tier, or in the other one."""
Values = Mapping[str, Hashable]
"""One case of a test: its parameters."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which cases of a test stay in the default tier, and why the others may leave it."""

    strength: int = 0
    """Every combination of values of so many parameters stays, in one of the cases; 0: none."""
    keep: tuple[str, ...] = ()
    """Patterns of ids of cases that stay."""
    drop: tuple[str, ...] = ()
    """Patterns of ids of cases that leave; all others stay."""
    by: tuple[str, ...] = ()
    """Tests of the default tier that fail where a case that left would."""
    why: str = ""


def each(why: str, *by: str) -> Rule:
    """Keep cases until every value of every parameter is in one of them."""
    return Rule(strength=1, why=why, by=by)


def pairs(why: str, *by: str) -> Rule:
    """Keep cases until every two values of two parameters that meet at all meet in one of them."""
    return Rule(strength=2, why=why, by=by)


def only(*ids: str, why: str, by: Sequence[str] = ()) -> Rule:
    """Keep the cases with these ids (patterns)."""
    return Rule(keep=ids, why=why, by=tuple(by))


def without(*ids: str, why: str, by: Sequence[str] = ()) -> Rule:
    """Keep all cases but those with these ids (patterns)."""
    return Rule(drop=ids, why=why, by=tuple(by))


def replaced(*by: str, why: str) -> Rule:
    """Keep no case: tests ``by`` of the default tier stand for this one."""
    return Rule(why=why, by=by)


LEFT_OUT: dict[str, dict[str, Rule]] = {
    "cli/test_estimate.py": {
        "test_baselines_on_request": replaced(
            "cli/test_estimate.py::test_baselines_of_a_machine_the_paper_does_not_know",
            "planning/test_baselines.py::test_sppo_reaches_what_the_paper_claims",
            "planning/test_baselines.py::test_claims_of_the_paper_stand_beside_its_model_and_machine_only",
            why="a search of twenty seconds: its figures have tests of their own, and what another"
            " one finds is printed the same way",
        ),
    },
    "cli/test_planning_doc.py": {
        "test_a_command_of_the_text": without(
            "sequence.length=4Mi hardware.nodes=16",
            "parallel.schedule=sppo sequence.length=512Ki",
            "model.preset=gpt-13b*",
            "*--ablation",
            "--baselines",
            "model.preset=gpt-7b*",
            why="searches like those of the commands that stay, or the same ones",
            by=(
                "cli/test_solve.py::test_ablation_beside_the_paper",
                "cli/test_estimate.py::test_baselines_of_a_machine_the_paper_does_not_know",
                "cli/test_estimate.py::test_the_table_states_both_counts_and_ours",
            ),
        ),
        "test_a_row_of_the_table_of_degrees": only(
            "512Ki-*",
            "1Mi-*",
            why="both ends of the table",
        ),
    },
    "cli/test_train.py": {
        "test_a_limit_of_addresses_is_told_in_a_line": only(
            "700", why="before torch is loaded; what is told after it is the same line"
        ),
        "test_what_may_change_on_the_way": only("words1", "words4", why="two of five keys"),
        "test_only_the_newest_checkpoints_stay": only("1-left0", why="the fewest that may stay"),
        "test_the_end_saves": replaced(
            "training/whole_runs/test_resume.py::test_more_steps_go_on",
            why="it goes on from what the end has saved",
        ),
        "test_a_run_is_done_without_its_plot_or_summary": only(
            "run_summary.json", why="both are written by one function"
        ),
        "test_a_disk_that_fills_up_while_writing": only(
            "extra1", why="background saves meet the same disk"
        ),
        "test_a_signal_after_the_last_step_leaves_the_exit_code_0": only(
            "15", why="both signals have one handler"
        ),
        "test_standard_output_on_a_full_disk": replaced(
            "test_output_file.py::test_a_full_disk",
            "cli/test_train.py::test_a_disk_too_full_for_a_line_of_metrics",
            why="the same error of another file",
        ),
    },
    "cli/test_solve.py": {
        "test_solving_never_loads_torch": without(
            "words1",
            "words2",
            why="searches for long; the import contract refuses torch there",
            by=("test_layers.py::test_the_planning_core_runs_without_torch",),
        ),
        "test_offload_ratios_and_host_memory_are_shown": replaced(
            "cli/test_solve.py::test_json_has_the_promised_keys",
            "cli/test_solve.py::test_the_table_is_enough_to_decide_from",
            why="figures and table of another request",
        ),
    },
    "scripts/test_full_disk_script.py": {
        "test_every_kind_of_file_on_a_full_disk": replaced(
            "test_output_file.py::test_a_full_disk",
            "cli/test_train.py::test_a_disk_too_full_for_a_line_of_metrics",
            why="how all commands write, and a run on a full disk",
        ),
    },
    # Scripts and documents: processes that import torch for a few milliseconds of work.
    "test_documents.py": {
        "test_commands_of_a_page": only(
            "README.md: *",
            why="the README runs the same commands; planning, conversion, scripts, measurements "
            "and several ranks have tests of their own",
            by=(
                "cli/test_data_stats.py::test_table",
                "cli/test_config.py::test_check_says_so_when_nothing_is_wrong",
                "cli/test_config.py::test_check_lists_all_that_is_wrong",
                "training/test_trainer.py::test_losses_norms_and_weights_are_those_of_ordinary_training",
                "cli/test_estimate.py::test_baselines_of_a_machine_the_paper_does_not_know",
                "cli/test_bench.py::test_a_real_measurement_is_read_back_by_plans",
                "cli/test_eval.py::test_the_table",
                "cli/test_solve.py::test_a_plan_is_written_read_and_simulated",
                "interface/test_training.py::test_ranks_are_started_and_learn_the_same",
                "cli/test_convert.py::test_to_hf_takes_the_newest_checkpoint",
                "training/whole_runs/test_parallel_runs.py::test_losses_and_weights_are_those_of_one_rank",
                "parallel/job/test_rendezvous.py::test_a_killed_rank_ends_the_job_and_is_named",
                "experiments/test_comparisons.py::test_the_sides_run_and_are_reported",
            ),
        ),
        "test_python_of_a_page": replaced(
            "interface/test_training.py::test_trains_as_the_command_does",
            "interface/test_training.py::test_evaluates_as_the_command_does",
            "interface/test_training.py::test_the_example_of_an_own_loop_learns",
            "interface/test_planning.py::test_solve_is_the_command",
            "interface/test_planning.py::test_simulate_is_the_command",
            why="the same functions, one by one, and a loop of one's own",
        ),
    },
    "scripts/test_state_tiers_script.py": {
        "test_the_two_trainings_take_turns_and_agree": replaced(
            "training/whole_runs/test_state_tiers.py::test_training_is_that_on_the_device",
            why="five processes that train; the same comparison of smaller runs in one process",
        ),
    },
    "scripts/test_elastic_script.py": {
        "test_all_sides_take_turns_and_agree": replaced(
            "experiments/test_comparisons.py::test_the_sides_run_and_are_reported",
            "scripts/test_elastic_script.py::test_sides_are_planned_for_the_same_tokens",
            why="ranks that start alike; what they are given is planned there",
        ),
        "test_one_rank_is_refused": replaced(
            "experiments/test_comparisons.py::test_the_sides_run_and_are_reported",
            why="a process that imports much, for one line",
        ),
    },
    "scripts/test_offload_script.py": {
        "test_both_sides_take_turns_and_agree": replaced(
            "experiments/test_comparisons.py::test_the_sides_run_and_are_reported",
            why="they share the harness; what this one compares is in the other tier alone",
        ),
    },
    "scripts/test_gpu_training_script.py": {
        "test_the_rehearsal_fills_the_report": replaced(
            "scripts/test_gpu_training_script.py::test_what_fails_is_in_the_report_with_its_words",
            "training/devices/test_cuda_device.py::test_the_training_is_that_of_the_cpu",
            why="script and device start there; the whole rehearsal is in the other tier alone",
        ),
    },
    "scripts/test_rank_faults_script.py": {
        "test_one_fault_from_the_command_line": replaced(
            "parallel/job/test_rendezvous.py::test_a_killed_rank_ends_the_job_and_is_named",
            "training/whole_runs/test_resume.py::test_killed_in_step_seven",
            why="a fault of two ranks, and a run that goes on after one",
        ),
    },
    "scripts/test_long_run_scripts.py": {
        "test_a_slurm_job_starts_a_task_for_every_rank": replaced(
            "scripts/test_long_run_scripts.py::test_every_device_of_the_job_is_planned_for",
            "parallel/job/test_environment.py::test_srun",
            why="what the script plans for, and how ranks know their places under SLURM",
        ),
        "test_two_ranks_of_a_node_train_by_the_plan": replaced(
            "scripts/test_long_run_scripts.py::test_a_plan_for_gpus_is_not_started_where_there_is_none",
            "interface/test_training.py::test_ranks_are_started_and_learn_the_same",
            "interface/test_training.py::test_follows_a_plan",
            why="the script up to the call that trains, and what that call does",
        ),
        "test_what_does_not_fit_stops_with_the_solvers_reasons": replaced(
            "cli/test_solve.py::test_what_does_not_fit_ends_with_3_on_one_screen",
            "scripts/test_long_run_scripts.py::test_a_plan_for_gpus_is_not_started_where_there_is_none",
            why="the solver's reasons and exit code, and a script that stops after planning",
        ),
        "test_a_cpu_trains_by_the_plan_it_prints": replaced(
            "scripts/test_long_run_scripts.py::test_one_gpu_plans_a_million_tokens",
            "scripts/test_long_run_scripts.py::test_a_plan_for_gpus_is_not_started_where_there_is_none",
            why="the script up to the call that trains",
        ),
    },
    "test_hf_training.py": {
        "test_samples_train_as_transformers_does_one_by_one": only(
            "gpt2, recomputed-2",
            why="learned positions and two ranks; the others are in the engine's comparison",
            by=("engine/test_packed_samples.py::test_samples_train_as_if_each_were_alone",),
        ),
        "test_five_steps_are_those_of_transformers": without(
            "llama",
            "qwen2, tied",
            "qwen3",
            "mistral, tied",
            "gpt2, untied",
            "gpt2, layer by layer",
            "mistral, layer by layer",
            why="one case of each family, with every policy, cut and schedule of the rate",
        ),
        "test_the_installed_command_does_the_same": replaced(
            "test_hf_training.py::test_five_steps_are_those_of_transformers",
            "test_documents.py::test_commands_of_a_page",
            why="numbers are compared in one process, and the README runs the installed command",
        ),
    },
}
"""By file and name; the tests that stand for others are ``file::name``. Files are below tests/."""

RULES = {
    f"{file}::{name}": rule for file, rules in LEFT_OUT.items() for name, rule in rules.items()
}


def staying(rule: Rule, cases: Sequence[tuple[str, Values]]) -> set[int]:
    """Return which cases of one test stay in the default tier.

    Args:
        rule: of the test.
        cases: the id, without brackets, and the parameters of each.

    Returns:
        Positions in ``cases``.
    """
    if rule.strength:
        return _covering([values for _, values in cases], rule.strength)
    if rule.drop:
        return {i for i, (name, _) in enumerate(cases) if not _matches(name, rule.drop)}
    return {i for i, (name, _) in enumerate(cases) if _matches(name, rule.keep)}


def idle_parts(rule: Rule, cases: Sequence[tuple[str, Values]]) -> list[str]:
    """Return what of a rule changes nothing: patterns without a case, or the rule if all stay.

    Args:
        rule: of the test.
        cases: all of them, as for :func:`staying`.
    """
    idle = [
        pattern
        for pattern in (*rule.keep, *rule.drop)
        if not any(_matches(name, (pattern,)) for name, _ in cases)
    ]
    if len(staying(rule, cases)) == len(cases):
        idle.append("every case stays")
    return idle


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


def _covering(cases: Sequence[Values], strength: int) -> set[int]:
    """Choose few cases in which every combination of ``strength`` parameters' values occurs."""
    combinations = [
        set(itertools.combinations(sorted(values.items(), key=_name), min(strength, len(values))))
        for values in cases
    ]
    missing, chosen = set().union(*combinations), set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(combinations[i] & missing))
        missing -= combinations[best]
        chosen.add(best)
    return chosen


def _name(item: tuple[str, Hashable]) -> str:
    return item[0]


def mark(items: Sequence[Any], marker: Any) -> list[str]:
    """Add ``marker`` to the collected tests that stay out of the default tier.

    What another mark keeps out of it, too, neither gets this one nor stands for anything.

    Args:
        items: pytest's, of one session.
        marker: what is added.

    Returns:
        Parts of the list that change nothing for the tests that were collected.
    """
    idle = []
    by_test: dict[str, list[Any]] = {}
    for item in items:
        if any(map(item.get_closest_marker, OTHER_MARKS)):
            continue
        name, _, _ = item.nodeid.partition("[")
        by_test.setdefault(name.removeprefix("tests/"), []).append(item)
    for name, rule in RULES.items():
        if name not in by_test:
            continue
        cases = [(_id(item), _values(item)) for item in by_test[name]]
        idle += [f"{name}: {part}" for part in idle_parts(rule, cases)]
        kept = staying(rule, cases)
        for i, item in enumerate(by_test[name]):
            if i not in kept:
                item.add_marker(marker)
    return idle


def _id(item: Any) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _values(item: Any) -> Values:
    """Return the parameters of a case, each as text that is the same for the same value."""
    case = getattr(item, "callspec", None)
    return {} if case is None else {name: repr(value) for name, value in case.params.items()}
