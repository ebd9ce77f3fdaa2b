"""The clock: rounds over all cases, medians, warm calls."""

import pytest

from sppo.bench import timing
from sppo.bench.timing import KernelBench, Rounds, Timing


class Machine:
    """A clock that only calls advance, and what was called."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def cases(self, **takes):
        """Cases that take each of their seconds in turn, one per round."""
        return {key: self._make(key, seconds) for key, seconds in takes.items()}

    def _make(self, key, seconds):
        rounds = iter(seconds)

        def make():
            takes = next(rounds)
            self.log.append(f"make {key}")

            def call():
                self.log.append(key)
                self.now += takes

            return call

        return make


class Watcher:
    def __init__(self):
        self.begun, self.advanced = [], 0

    def begin(self, subject, *, total):
        self.begun.append((subject, total))

    def advance(self):
        self.advanced += 1


def bench_of(operands, rounds, watcher=None, *, dtypes=("fp32",)):
    return KernelBench(operands, dtypes, rounds, watcher or Watcher())


def test_all_cases_take_turns(operands, monkeypatch):
    machine, watcher = Machine(monkeypatch), Watcher()
    cases = machine.cases(a=(1.0, 5.0, 1.2), b=(2.0, 2.0, 2.0))
    bench = bench_of(operands, Rounds(count=3, window_s=0.0), watcher)
    found = bench.time("letters", cases)
    made = [line for line in machine.log if line.startswith("make")]
    assert made == ["make a", "make b"] * 3
    assert found["a"] == Timing(pytest.approx(1.2), pytest.approx(4 / 1.2))
    assert found["b"].median_s == pytest.approx(2.0)
    assert watcher.begun == [("letters", 6)]
    assert watcher.advanced == 6
    assert bench.spreads == [found["a"].spread, found["b"].spread]


def test_short_calls_are_warmed_up_and_repeated(operands, monkeypatch):
    machine = Machine(monkeypatch)
    cases = machine.cases(a=(0.001, 0.001))
    found = bench_of(operands, Rounds(count=2, window_s=0.01)).time("letters", cases)
    assert found["a"].median_s == pytest.approx(0.001)
    # Once to warm up and once to see how long it is, then a window; the second round knows that.
    assert machine.log.count("a") == pytest.approx((2 + 10) + (1 + 10), abs=2)


def test_long_calls_are_not_repeated(operands, monkeypatch):
    machine = Machine(monkeypatch)
    rounds, watcher = Rounds(count=4, count_long=3, window_s=0.01), Watcher()
    bench_of(operands, rounds, watcher).time("letters", machine.cases(a=(1.0, 1.0, 1.0)))
    assert machine.log.count("a") == 3 + 1 + 1
    assert watcher.advanced == 4


def test_one_call_is_measured_warm(operands, monkeypatch):
    machine = Machine(monkeypatch)
    takes = iter([9.0, 0.5])
    call = lambda: setattr(machine, "now", machine.now + next(takes))  # noqa: E731
    assert bench_of(operands, Rounds()).time_once(call) == 0.5
