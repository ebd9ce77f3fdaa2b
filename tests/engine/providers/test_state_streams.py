"""Weights and gradients in another tier: the same step with less memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sppo.engine.executor import Executor
from sppo.engine.providers.streamed_rows import StreamedGradients, StreamedWeights
from sppo.engine.step_units import StepUnits
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.costs import abstract_costs
from sppo.schedule.program import generate, lower
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.timeline import COMMUNICATION
from tests.engine.models import (
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.engine.streaming import LateLane, Streamed, names_of_stages
from tests.engine.test_looped import looped


@pytest.mark.parametrize("variant", ["gqa, q/k-norm", "tied, yarn, all biases"])
def test_two_stages_are_there_at_once(variant):
    model = tiny_model(variant, num_layers=5)
    weights, pipeline = random_weights(model), looped(5)
    streamed = Streamed(model, weights, pipeline=pipeline)
    streamed.step([random_sequence(model, 23)], [(0, 9, 23)])
    sizes = {name: weight.numel() * 8 for name, weight in weights.items()}
    stages = names_of_stages(model, pipeline)
    pairs = [{*stages[n], *stages[n + 1]} for n in range(4)]
    assert streamed.weights.take_peak_bytes() == max(sum(map(sizes.get, pair)) for pair in pairs)
    # A tied embedding's gradient is there from the last stage's forward to the first's backward.
    tied = {"embed.weight"} if model.tie_embeddings else set()
    most = max(sum(map(sizes.get, pair | tied)) for pair in pairs)
    assert streamed.sums.take_peak_bytes() == most
    assert not streamed.weights._here
    assert not streamed.sums._here


def executor(program, rank, *, units=None, **provided):
    """An executor for the actions of whole stages, and for those that ``units`` serves."""
    nothing = SimpleNamespace(has_links=True, send=None, receive=None)
    return Executor(program, rank=rank, units=units, buffers=nothing, stopwatch=None, **provided)


def test_the_return_of_a_shard_asks_for_its_stage_alone():
    """Cutting the unit takes communicators, and nothing runs the shard yet."""
    keys = {"kv_keys": lambda unit: [("kv", unit)], "saved_keys": lambda unit: [("saved", unit)]}
    permitted = []
    stage = SimpleNamespace(
        layout=SimpleNamespace(**keys), store=SimpleNamespace(permit=permitted.extend)
    )
    program = generate("seq1f1b", num_ranks=1, lengths=((1,),))
    units = StepUnits(program, units={}, stages={}, shard_stages={0: stage}, pipeline=None)
    one = executor(program, 0, units=units, weights=None, gradients=None)
    for wire in (None, "kv"):
        one._start_reload(Action(ActionKind.H2D, 0, 0, 0, wire, shard=1, num_shards=2))
    assert permitted == [("saved", (0, 0)), ("kv", (0, 0))]


def test_only_the_last_stage_of_a_rank_waits_for_reductions():
    """Those of the others travel while the next one computes."""
    log = []
    provider = SimpleNamespace(reduce=log.append, wait_reductions=lambda: log.append("settled"))
    plain = generate("looped_bfs", num_ranks=1, num_virtual=3, lengths=((1, 1),))
    program = lower(plain, costs=abstract_costs(3, num_units=2, forward_s=1.0, backward_s=2.0))
    one = executor(program, 0, weights=None, gradients=provider)
    for action in program.programs[0]:
        if action.kind is ActionKind.REDUCE:
            one._reduce(action)
    assert log == [2, 1, 0, "settled"]


@pytest.mark.parametrize(("p", "v", "n", "m"), [(1, 3, 2, 2), (2, 2, 4, 1), (2, 2, 1, 6)])
@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_seq1f1b"])
def test_it_waits_for_reductions_as_often_as_is_priced(schedule, p, v, n, m):
    """Where sums leave that are added to once more, too; those behind a REDUCE are its own."""
    stages = p * v
    costs = replace(
        abstract_costs(stages, num_units=n * m, forward_s=0.0, backward_s=0.0),
        last_reduction_wait_s=2.0 ** np.arange(stages),
        streamed_gradient_bytes=np.ones(stages),
    )
    lengths = ((1,) * n,) * m
    plain = generate(schedule, num_ranks=p, num_virtual=v, lengths=lengths)
    program = lower(plain, costs=costs)
    idle_s = simulate(program, costs=costs).idle_s
    sums = SimpleNamespace(leave=lambda stage, complete: None, bring_back=lambda stage: None)
    settled = []
    provider = SimpleNamespace(
        reduce=lambda stage: None, wait_reductions=lambda: settled.append(1), streamed=sums
    )
    for rank, actions in enumerate(program.programs):
        one = executor(program, rank, weights=None, gradients=provider)
        waited_s, reduced = 0.0, set()
        for action in actions:
            if action.kind is ActionKind.REDUCE:
                one._reduce(action)
                reduced.add(action.stage)
            elif action.wire == "gradients":
                settled.clear()
                one._handlers[action.kind](action)
                waited_s += (
                    len(settled)
                    * costs.last_reduction_wait_s[action.stage]
                    * (action.stage not in reduced)
                )
        assert idle_s[rank, COMMUNICATION] == waited_s
        leave = sum(a.kind is ActionKind.D2H and a.wire == "gradients" for a in actions)
        assert (waited_s > 0) == (leave > v)


def test_a_step_that_fails_closes_the_engine():
    model = tiny_model("tied, yarn, all biases", num_layers=4)
    weights = random_weights(model)
    data, cuts = [random_sequence(model, 23)], [(0, 9, 23)]
    length = len(
        Streamed(model, weights, pipeline=looped(4)).engine.schedule([(9, 14)]).programs[0]
    )
    for failing in range(0, length, 3):
        streamed = Streamed(model, weights, pipeline=looped(4))

        def fail(position, action, failing=failing):
            if position == failing:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            streamed.step(data, cuts, before_action=fail)
        assert not streamed.weights._here
        assert not streamed.sums._here
        with pytest.raises(RuntimeError, match="this engine is closed"):
            streamed.step(data, cuts)


def streamed_rows(lane):
    """Weights and sums of two stages of one row each, and rows that are on the device or move."""
    rows = {"first": torch.ones(3), "second": torch.ones(3)}
    how = {"stages": {0: ["first"], 1: ["second"]}, "device": torch.device("cpu"), "lane": lane}
    weights, sums = StreamedWeights(rows, **how), StreamedGradients(rows, **how)
    weights.fetch(0)
    sums.bring_back(1)
    sums.leave(0, complete=True)
    return weights, sums


def test_closed_rows_keep_nothing_of_copies_under_way():
    weights, sums = streamed_rows(LateLane())
    held = [weights._here["first"], sums._here["second"], sums._leaving[1][0]]
    held = [weakref.ref(row) for row in held]
    weights.close()
    sums.close()
    assert [row() for row in held] == [None] * 3


class NoAnswer:
    """Lane of a device that no longer answers: a wait for a copy may hang, also one of compute."""

    def computed(self, tensors):
        return self

    def out(self, copies, *, after):
        return self

    back = out

    def before_compute(self, event):
        raise AssertionError("waits for a device that no longer answers")

    def close(self):
        return False


def test_what_a_device_that_no_longer_answers_may_use_stays():
    weights, sums = streamed_rows(NoAnswer())
    weights.close()
    sums.close()
    assert weights.has(["first"])
    assert [*sums._here] == ["second"]
    assert sums._leaving is not None
    assert sums._leaving[1]
