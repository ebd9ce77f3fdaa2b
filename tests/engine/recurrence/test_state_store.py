"""States at the borders of units: their order, their bytes, and what becomes of them."""

from itertools import pairwise

import pytest
import torch

from sppo.engine.recurrence.state_store import StateStore
from sppo.engine.unit import TokenSpan
from sppo.model.recurrence import State
from sppo.offload.retained import HeldBytes

CUTS = (0, 1, 3, 10)
UNITS = [TokenSpan(*unit, boundaries=CUTS) for unit in pairwise(CUTS)]
STATE_BYTES = 2 * 3 * 3 * 4 + 3 * 8 * 2


def state(value):
    wide = torch.full((5, 8), value, dtype=torch.bfloat16)
    return State(torch.full((2, 3, 3), value), wide[-3:])


def values(found):
    return None if found is None else [set(part.flatten().tolist()) for part in found]


def of_value(value):
    return [{value}, {value}]


def forward(states, *, for_backward=True):
    for number, span in enumerate(UNITS):
        states.leave(span, state(float(number)), for_backward=for_backward)


def test_a_unit_starts_from_what_the_one_before_it_left_forward_and_backward():
    held = HeldBytes()
    states = StateStore(held).of(0, 0)
    forward(states)
    assert held.now == 2 * STATE_BYTES, "a view of all rows was kept, or the last state"
    behind = None
    for number, span in reversed([*enumerate(UNITS)]):
        assert values(states.before(span)) == (of_value(number - 1.0) if number else None)
        assert values(states.gradient_behind(span)) == behind
        gradient = state(10.0 + number) if number else None
        states.hand_back(span, gradient)
        behind = values(gradient)
        assert held.now == number * STATE_BYTES, "the gradient takes the place of the state"
    assert held.peak == 2 * STATE_BYTES


def test_units_come_in_order():
    states = StateStore(HeldBytes()).of(3, 1)
    with pytest.raises(AssertionError, match="layer 3, sequence 1: forward at 1, where 0 tokens"):
        states.leave(UNITS[1], state(0.0), for_backward=True)
    forward(states)
    with pytest.raises(AssertionError, match=r"backward of \[1, 3\) but units down to 10 have run"):
        states.gradient_behind(UNITS[1])


def test_forward_alone_keeps_the_newest_state_only():
    held = HeldBytes()
    forward(StateStore(held).of(0, 0), for_backward=False)
    assert held.peak == STATE_BYTES
    assert held.now == 0


def test_sequences_are_released_layer_by_layer():
    held = HeldBytes()
    store = StateStore(held)
    for layer, sequence in ((0, 0), (1, 0), (1, 1)):
        forward(store.of(layer, sequence))
    store.release(0, layers=[0, 7])
    assert (store.num_sequences, held.now) == (2, 4 * STATE_BYTES)
    store.release(0, layers=[1])
    store.release(1, layers=[1])
    assert (store.num_sequences, held.now) == (0, 0)


def test_what_is_freed_is_poisoned_for_debugging():
    store = StateStore(HeldBytes(), poison=True)
    states = store.of(0, 0)
    forward(states)
    lent = [states.before(UNITS[2])]
    states.hand_back(UNITS[2], state(1.0))
    lent += [states.gradient_behind(UNITS[1]), states.before(UNITS[1])]
    assert not any(part.isnan().any() for part in lent[2])
    store.release(0, layers=[0])
    assert all(part.isnan().all() for one in lent for part in one)
