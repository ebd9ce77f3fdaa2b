"""Random trainings: every number is that of plain autograd in float64, and defects are found.

For many more, or one again that a failure shows::

    pytest tests/random_training -k random_trainings --seed 4711 --count 2000
    pytest tests/random_training -k random_trainings --case "Case(seed=4711, dtype='fp64')"
"""

import logging
import time
from itertools import islice

import pytest
import torch

import tests.random_training.case as case_module
from tests.random_training.case import Case, Leg, Shape
from tests.random_training.draw import draw
from tests.random_training.emulated_ranks import Distributed, run_emulated
from tests.random_training.mutations import MUTATIONS
from tests.random_training.pinned_cases import PINNED
from tests.random_training.training import faults_of
from tests.random_training.turns import Deadlock, Turns
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
    """Also their messages are real; of the cases of up to four ranks the first few."""
    cases = [case for case in map(draw, range(1000, 1100)) if 2 <= case.num_ranks <= 4]
    cases = cases[: examples(2, all=4)]
    assert {leg.sequence_parallel for case in cases for leg in case.legs} == {"ulysses", "megatron"}
    wrong = [f"{case}: {faults}" for case in cases if (faults := faults_of(case, ranks))]
    assert not wrong, "\n".join(wrong)


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


def test_emulated_ranks_do_the_same_again():
    case = Case(seed=5, legs=(Leg(pp=2, sp=2, replica_sequences=2, steps=2),))

    def order(rank, turns, dist):
        group, seen = dist.new_group([0, 1, 2]), []
        for number in range(20):
            tensor = torch.tensor([float(rank)])
            work = dist.all_reduce(tensor, group=group, async_op=True)
            seen.append((turns.random.random(), float(tensor), number))
            work.wait()
            assert float(tensor) == 3.0
        return seen

    def once():
        turns = Turns(3, seed=3)
        dist = Distributed(turns)
        return turns.run(lambda rank: order(rank, turns, dist))

    assert once() == once()
    assert faults_of(case) == []


def test_ranks_that_wait_for_each_other_are_found_at_once():
    def wait_first(rank):
        from sppo.parallel import pipeline_p2p

        group = pipeline_p2p.dist.new_group([0, 1])
        pipeline_p2p.dist.recv(torch.zeros(1), 1 - rank, group=group)

    begin = time.monotonic()
    with pytest.raises(Deadlock, match="0: rank 1 to send; 1: rank 0 to send"):
        run_emulated(wait_first, ranks=2, seed=0)
    assert time.monotonic() - begin < 10
