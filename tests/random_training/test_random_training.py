"""Random trainings: every number is that of plain autograd in float64, and defects are found.

For many more, or one again that a failure shows::

    pytest tests/random_training -k random_trainings --seed 4711 --count 2000
    pytest tests/random_training -k random_trainings --case "Case(seed=4711, dtype='fp64')"
"""

import logging
from itertools import islice

import pytest

import tests.random_training.case as case_module
from tests.random_training.case import Case, Shape
from tests.random_training.draw import draw
from tests.random_training.mutations import MUTATIONS
from tests.random_training.pinned_cases import PINNED
from tests.random_training.training import faults_of
from tests.tiers import default_of, examples, exhaustive

MOST_TRIED = 12
"""Cases that may show a defect before one must have."""


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Without the advice not to move tensors to a disk in memory."""
    caplog.set_level(logging.ERROR, logger="sppo")


@pytest.mark.parametrize("first", [0, *exhaustive(10, 20)])
def test_every_number_of_random_trainings(first, pytestconfig):
    seed, count, shown = map(pytestconfig.getoption, ("--seed", "--count", "--case"))
    cases = [draw(seed + first + number) for number in range(count)]
    if shown is not None:
        cases = [eval(shown, vars(case_module))]
    wrong = [f"{case}: {faults}" for case in cases if (faults := faults_of(case))]
    assert not wrong, "\n".join(wrong)


def test_ranks_that_are_processes(ranks):
    """Also their messages are real: of the first cases of up to four ranks that share tokens."""
    found = [case for case in map(draw, range(1000, 1100)) if 2 <= case.num_ranks <= 4]
    cases = [
        case
        for how in ("ulysses", "megatron")
        for case in [c for c in found if _shares_tokens(c, how)][: examples(1, all=2)]
    ]
    assert len(cases) >= 2
    wrong = [f"{case}: {faults}" for case in cases if (faults := faults_of(case, ranks))]
    assert not wrong, "\n".join(wrong)


def _shares_tokens(case, how):
    return any(leg.sp > 1 and leg.sequence_parallel == how for leg in case.legs)


@pytest.mark.parametrize("name", PINNED)
def test_every_number_of_a_pinned_training(name):
    assert faults_of(PINNED[name]) == []


@pytest.mark.parametrize(
    "name",
    default_of(
        MUTATIONS,
        "message_not_awaited",
        "norm_of_own_gradients",
        "prefix_without_dk",
        "reductions_reused",
        "sink_gradient_missing",
        "whole_factors_not_summed",
    ),
)
def test_a_defect_is_found(name):
    put_in, may_show = MUTATIONS[name]
    cases = [*islice(filter(may_show, map(draw, range(500))), MOST_TRIED)]
    for case in cases:
        with put_in():
            faults = faults_of(case)
        if faults:
            assert not faults_of(case)
            return
    pytest.fail(f"{name} shows in none of {len(cases)} cases")


def test_a_case_can_be_pasted():
    for seed in range(50):
        case = draw(seed)
        assert eval(repr(case), vars(case_module)) == case
        assert "\n" not in repr(case)
    assert repr(Case(model=Shape(layers=3))) == "Case(model=Shape(layers=3))"
