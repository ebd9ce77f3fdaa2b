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
KEY = (3, 1)


def state(value):
    wide = torch.full((5, 8), value, dtype=torch.bfloat16)
    return State(torch.full((2, 3, 3), value), wide[-3:])


def values(found):
    return None if found is None else [set(part.flatten().tolist()) for part in found]


def of_value(value):
    return [{value}, {value}]


def forward(store, *, key=KEY, saves=True):
    for number, span in enumerate(UNITS):
        store.leave(key, span, state(float(number)), saves=saves)


def test_a_unit_starts_from_what_the_one_before_it_left_forward_and_backward():
    held = HeldBytes()
    store = StateStore(held)
    forward(store)
    assert held.now == 2 * STATE_BYTES, "a view of all rows was kept, or the last state"
    behind = None
    for number, span in reversed([*enumerate(UNITS)]):
        assert store.num_sequences == 1
        assert values(store.before(KEY, span)) == (of_value(number - 1.0) if number else None)
        assert values(store.gradient_behind(KEY)) == behind
        gradient = state(10.0 + number) if number else None
        store.hand_back(KEY, span, gradient)
        behind = values(gradient)
        assert held.now == number * STATE_BYTES, "the gradient takes the place of the state"
    assert held.peak == 2 * STATE_BYTES
    assert store.num_sequences == 0


def test_units_come_in_order():
    store = StateStore(HeldBytes())
    with pytest.raises(AssertionError, match="layer 3, sequence 1: a unit from 1 to 3 runs, .* 0$"):
        store.leave(KEY, UNITS[1], state(0.0), saves=True)
    forward(store)
    with pytest.raises(AssertionError, match=r"a unit from 3 to 1 runs, .* have run to 10$"):
        store.hand_back(KEY, UNITS[1], None)


def test_forward_alone_keeps_the_newest_state_only():
    held = HeldBytes()
    store = StateStore(held)
    forward(store, saves=False)
    assert held.peak == STATE_BYTES
    assert (held.now, store.num_sequences) == (0, 0)


def test_what_is_freed_is_poisoned_for_debugging():
    store = StateStore(HeldBytes(), poison=True)
    forward(store)
    lent = [store.before(KEY, UNITS[2])]
    store.hand_back(KEY, UNITS[2], state(1.0))
    lent += [store.before(KEY, UNITS[1]), store.gradient_behind(KEY)]
    assert not any(part.isnan().any() for one in lent[1:] for part in one)
    store.hand_back(KEY, UNITS[1], None)
    assert all(part.isnan().all() for one in lent for part in one)
