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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

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


_ONE_RANK_GRID = "engine/test_gradients.py::test_policies_agree_bit_for_bit"
_OTHER_DEGREES = "train/test_parallel_runs.py::test_a_run_goes_on_with_other_degrees"

LEFT_OUT: dict[str, dict[str, Rule]] = {
    # engine/: products of schedules, shapes, models and policies, each step compared with autograd.
    "engine/test_megatron.py": {
        "test_steps_in_a_row": each(
            "each schedule and number of key/value heads, with and without shared weights"
        ),
        "test_blocks_of_which_replicas_keep_rows": each(
            "each shape and each number of key/value heads once"
        ),
        "test_gradients_of_every_model": each(
            "every model meets every policy on one rank; here each of them meets the mesh",
            _ONE_RANK_GRID,
        ),
        "test_gradients_with_shared_heads": each(
            "each shape and each number of key/value heads once"
        ),
        "test_tensors_that_move": each(
            "each ratio once, and with and without a pipeline; every ratio meets one rank",
            "engine/test_offload.py::test_any_offload_ratio_is_everything_kept",
        ),
    },
    "engine/test_gathered_weights.py": {
        "test_gradients_of_steps_in_a_row": each("each shape, schedule and kind of embedding once"),
        "test_gradients_of_other_models": each("each model and policy once", _ONE_RANK_GRID),
    },
    "engine/test_pipeline.py": {
        "test_gradients_of_a_pipeline": pairs(
            "schedules x ranks x sequences; every two of them meet"
        ),
        "test_gradients_of_every_model_on_every_axis": each(
            "every model meets every policy on one rank; here each of them meets the mesh",
            _ONE_RANK_GRID,
        ),
        "test_gradients_with_shared_heads": each(
            "each shape and each number of key/value heads once"
        ),
        "test_weight_gradients_outlive_the_sequence_they_belong_to": pairs(
            "schedules x sequence parallelism x shapes; every two of them meet"
        ),
        "test_tensors_moved_to_a_disk_in_every_stage": each("each schedule and shape once"),
    },
    "engine/msp/test_msp.py": {
        "test_gradients": each("each number of stages and of subsequences once"),
        "test_every_model": each(
            "each model and policy once; every model meets every policy on one rank", _ONE_RANK_GRID
        ),
        "test_with_sequence_and_data_parallelism": each("each shape and policy once"),
        "test_with_tensors_moved_to_a_disk": each("each ratio and number of stages once"),
    },
    "engine/test_shared_inputs.py": {
        "test_shared_inputs_change_no_bit": each("each model, type and interval once"),
    },
    "engine/test_offload.py": {
        "test_cut_tensors_whose_rest_is_recomputed_agree_within_a_rounding": pairs(
            "models x types; every two of them meet"
        ),
    },
    "engine/test_triton_steps.py": {
        "test_a_step_has_the_gradients_of_the_plain_model": without(
            "gqa*", why="its heads, norms and layers are those of the other models"
        ),
        "test_recomputed_tensors_have_their_bits": only(
            "mixed*",
            why="the model whose layers differ meets the kernels of the others",
            by=("engine/test_triton_steps.py::test_a_step_has_the_gradients_of_the_plain_model",),
        ),
    },
    # train/: whole runs on several ranks.
    "train/test_parallel_runs.py": {
        "test_losses_and_weights_are_those_of_one_rank": only(
            "(2, 2, 2)",
            why="all axes at once; single axes are met by runs that change them",
            by=(_OTHER_DEGREES,),
        ),
        "test_pieces_of_units_by_plan": only(
            "(2, 2, 2)",
            why="all axes at once; steps of other shapes are compared in the engine's tests",
            by=("engine/msp/test_msp.py::test_gradients",),
        ),
        "test_ranks_that_share_weights_out_do_what_one_does": only(
            "(2, 2, 2)",
            "(1, 1, 4)",
            why="all axes at once, and a key/value head on two ranks",
        ),
        "test_biases_and_norms_of_shared_weights": only(
            "3",
            why="biases and norms are sharded alike whatever of the optimizer's state is",
            by=("train/test_parallel_runs.py::test_other_schedules_and_state_that_nobody_shares",),
        ),
        "test_other_schedules_and_state_that_nobody_shares": each(
            "each schedule, ZeRO level and kind of embedding once"
        ),
        "test_a_run_of_many_ranks_goes_on_alone": replaced(
            "train/test_parallel_runs.py::test_a_run_goes_on_with_other_sequence_parallelism",
            why="that run goes from eight ranks to four and to one",
        ),
    },
    "train/test_zero_3_runs.py": {
        "test_ranks_that_keep_their_own_rows_of_weights_do_what_one_does": (
            only("(2, 2, 2)", why="all axes at once")
        ),
        "test_gathering_changes_no_bit": only("bf16", why="the type with master weights"),
    },
    "train/test_failing_ranks.py": {
        "test_a_signal_saves_on_all_ranks_and_says_what_is_left": replaced(
            "parallel/test_launch.py::test_a_signal_reaches_every_rank_once",
            "train/test_resume.py::test_a_request_to_stop_saves_and_ends_well",
            why="the signal's way to all ranks, and what a run does with it, one after the other",
        ),
        "test_a_rank_that_hangs_is_given_up_after_the_timeout": (
            replaced(
                "parallel/test_rendezvous.py::test_a_hung_rank_runs_into_the_timeout_and_is_named",
                why="the same wait and report, without the training around them",
            )
        ),
        "test_ranks_with_different_configurations_say_what_differs": (
            replaced(
                "parallel/test_rendezvous.py::test_ranks_that_differ_refuse_with_one_voice",
                why="the same comparison, without the training around it",
            )
        ),
    },
    "train/test_control_group.py": {
        "test_what_little_is_accepted_trains_to_its_end": replaced(
            "train/test_control_group.py::test_a_limit_is_planned_for",
            "train/test_trainer.py::test_measured_buckets_are_the_predicted_ones",
            why="a run in little memory, and what it took beside what was predicted",
        ),
        "test_too_low_a_limit_is_refused_before_anything_is_made": (
            replaced(
                "train/test_control_group.py::test_a_limit_is_planned_for",
                "cli/test_train.py::test_a_step_larger_than_memory_is_refused_before_anything_is_built",
                why="one shows that the limit is read, the other how what does not fit is refused",
            )
        ),
    },
    "train/test_gpu_runs.py": {
        "test_many_ranks_do_on_gpus_what_one_does_on_the_cpu": only(
            "(1, 2, 2)", why="both axes at once"
        ),
    },
    "train/test_cuda_device.py": {
        "test_the_training_is_that_of_the_cpu": without(
            "{'policy': 'offload_all'}", why="it is what `tier: host` with `debug` does"
        ),
    },
    "checkpoint/test_resharding.py": {
        "test_any_number_of_ranks_loads_what_four_have_saved": (
            only("0", "3", why="one process without a group, and a number that divides nothing")
        ),
    },
    # planning/ and cost/: searches, and steps of models of some size.
    "cost/test_working_set.py": {
        "test_it_is_what_the_allocator_hands_out": each("each shape, type and policy once"),
    },
    "cost/test_copy_room.py": {
        "test_cut_tensors_take_the_memory_that_is_predicted": each(
            "each class, fate and interval once"
        ),
    },
    "planning/test_feasibility.py": {
        "test_fitting_is_what_the_solver_calls_fitting": each("each length and policy once"),
    },
    "planning/test_solver.py": {
        "test_a_better_machine_is_never_slower": replaced(
            "planning/test_solver.py::test_nor_by_more_than_closed_forms_are_off_once_simulated",
            why="the same machines; that one is looser, so small steps back show in the other tier",
        ),
        "test_gpt_7b_on_32_gpus_is_shared_out_as_in_the_paper": only(
            "512Ki",
            "1Mi",
            why="both ends of the table",
            by=("cli/test_planning_doc.py::test_a_row_of_the_table_of_degrees",),
        ),
    },
    "cli/test_planning_doc.py": {
        "test_a_command_of_the_text": without(
            "sequence.length=4Mi hardware.nodes=16",
            "*--ablation",
            why="the same searches",
            by=(
                "cli/test_solve.py::test_ablation_beside_the_paper",
                "planning/test_solver.py::test_a_million_tokens_on_32_gpus_and_four_million_on_128",
            ),
        ),
    },
    # kernels/
    "kernels/triton/test_cross_entropy.py": {
        "test_losses_and_gradient": pairs(
            "types x shapes x terms of the loss; every two of them meet"
        ),
    },
    # Mutations of a trainer, to show that random trainings find them.
    "random_training/test_random_training.py": {
        "test_a_defect_is_found": without(
            "lent_saved_tensors",
            "lent_operands",
            why="tests of a test; two that search for long",
        ),
    },
    "cli/test_train.py": {
        "test_a_limit_of_addresses_is_told_in_a_line": without(
            "1500", why="two limits stay: before torch is loaded, and after"
        ),
    },
    # Scripts and documents: processes that import torch for a few milliseconds of work.
    "test_readme.py": {
        "test_command_of_the_readme": without(
            "bash scripts/compare_*",
            "OMP_WAIT_POLICY=passive python scripts/*",
            "sppo bench *",
            "sppo train run.yaml optimizer.lr=1e-3 train.outp*",
            "sppo train configs/run/tiny_cpu.yaml*",
            why="scripts, measurements and several ranks have tests of their own; the quickstart"
            " trains tiny_cpu.yaml",
            by=(
                "cli/test_bench.py::test_a_real_measurement_is_read_back_by_plans",
                "train/test_parallel_runs.py::test_losses_and_weights_are_those_of_one_rank",
                "train/test_failing_ranks.py"
                "::test_a_rank_that_is_killed_ends_the_job_which_then_resumes",
                "test_msp_script.py::test_both_sides_take_turns_and_agree",
                "test_compare_kernels_scripts.py::test_cross_entropy_beside_two_steps",
                "test_compare_kernels_scripts.py::test_attention_beside_one_unsplit_call",
            ),
        ),
    },
    "test_pipelining_script.py": {
        "test_both_sides_compute_the_same": replaced(
            "test_msp_script.py::test_both_sides_take_turns_and_agree",
            why="they share scripts/turns.py; what this one compares is in the other tier alone",
        ),
    },
    "test_offload_script.py": {
        "test_both_sides_take_turns_and_agree": replaced(
            "test_msp_script.py::test_both_sides_take_turns_and_agree",
            why="they share scripts/turns.py; what this one compares is in the other tier alone",
        ),
    },
    "test_compare_kernels_scripts.py": {
        "test_bad_options_are_refused": each("each script, option and message once"),
    },
    "test_gpu_training_script.py": {
        "test_the_rehearsal_fills_the_report": replaced(
            "test_gpu_training_script.py::test_what_fails_is_in_the_report_with_its_words",
            "train/test_cuda_device.py::test_the_training_is_that_of_the_cpu",
            why="script and device start there; the whole rehearsal is in the other tier alone",
        ),
    },
    "test_rank_faults_script.py": {
        "test_one_fault_from_the_command_line": replaced(
            "train/test_failing_ranks.py::test_a_rank_that_is_killed_ends_the_job_which_then_resumes",
            why="a fault of two ranks and the run that follows it",
        ),
    },
    "test_long_run_scripts.py": {
        "test_a_slurm_job_starts_a_task_for_every_rank": replaced(
            "test_long_run_scripts.py::test_two_ranks_of_a_node_train_by_the_plan",
            "parallel/test_environment.py::test_srun",
            why="the same run; how ranks know their places under SLURM has tests of its own",
        ),
        "test_a_cpu_trains_by_the_plan_it_prints": replaced(
            "test_long_run_scripts.py::test_two_ranks_of_a_node_train_by_the_plan",
            why="the same script, with two ranks",
        ),
    },
    "test_hf_training.py": {
        "test_five_steps_are_those_of_transformers": without(
            "llama",
            "qwen2, tied",
            "qwen3",
            "mistral, tied",
            why="one case of each family, with every policy, cut and schedule of the rate",
        ),
        "test_the_installed_command_does_the_same": replaced(
            "test_hf_training.py::test_five_steps_are_those_of_transformers",
            "test_readme.py::test_command_of_the_readme",
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


def mark(items: Sequence[Any], marker: Any) -> None:
    """Add ``marker`` to the collected tests that stay out of the default tier.

    What another mark keeps out of it, too, neither gets this one nor stands for anything.

    Args:
        items: pytest's, of one session.
        marker: what is added.
    """
    by_test: dict[str, list[Any]] = {}
    for item in items:
        if any(map(item.get_closest_marker, OTHER_MARKS)):
            continue
        name, _, _ = item.nodeid.partition("[")
        by_test.setdefault(name.removeprefix("tests/"), []).append(item)
    for name, rule in RULES.items():
        cases = by_test.get(name, [])
        kept = staying(rule, [(_id(item), _values(item)) for item in cases])
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(marker)


def _id(item: Any) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _values(item: Any) -> Values:
    """Return the parameters of a case, each as text that is the same for the same value."""
    case = getattr(item, "callspec", None)
    return {} if case is None else {name: repr(value) for name, value in case.params.items()}
