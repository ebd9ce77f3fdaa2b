"""Streams of the whole engine: accesses to the same memory are ordered; a lost wait is found."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from unittest.mock import patch

import pytest

from sppo.optim.host_adamw import HostAdamW
from tests.dry_run.cases import CASES, planned
from tests.dry_run.orderings import OrderingCheck
from tests.dry_run.streams import Wait, Worker
from tests.dry_run.traced_step import trace_step
from tests.tiers import default_of

OUT, BACK = "cuda_lane 1", "cuda_lane 2"
IMPLIED = {
    ("*", OUT, BACK): "compute has used what came back before it makes what goes there",
    ("optimizer on the host", "host", BACK): "compute waits for the last copy up, and the host for "
    "the first one down behind that",
    ("optimizer on the host", "compute", BACK): "the host itself waits for the last copies up",
    ("s* on the host", "host", BACK): "weights are on the host, too: it copies them itself",
    ("* a disk", "host", "sppo disk"): "where threads work at once nothing is issued late",
    ("K/V to a disk", "compute", OUT): "the host waits until a slot is written, and so copied out",
    ("multiplexed*", "compute", OUT): "the last sources of a shard come back through the other "
    "stream, for which compute waits, before their memory is used again",
    ("multiplexed*", BACK, "compute"): "so few shards use no slot of a ring twice in a step",
    ("multiplexed*", "compute", "communicator MSP shards*"): "what scatter sends is part of a "
    "tensor that outlives the shard",
}
"""Waits whose loss changes no order in these runs, by case, who waits, and for whom (patterns)."""


@cache
def trace(name, *, lost=frozenset()):
    run, plan = planned(name)
    check = OrderingCheck()
    # More buckets than slots, so that slots of the optimizer on the host are used again.
    with patch.dict(HostAdamW.__init__.__kwdefaults__, bucket_elements=1 << 12):
        return trace_step(run, plan, orderings=check, lost=lost), check


@pytest.mark.parametrize("name", default_of(CASES, "to a disk", "multiplexed"))
def test_all_work_on_the_same_memory_is_ordered(name):
    step, check = trace(name)
    assert not check.unordered
    assert check.num_accesses > 1000
    assert any(wait.worker == "compute" for wait in step.waits) or name == "optimizer on the host"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_lost_wait_is_found(name):
    """Without the host's waits for the whole device, behind which any other wait would hide."""
    step, _ = trace(name)
    device = whole_device(step)
    _, check = trace(name, lost=device)
    values = set(check.unordered)
    assert {unordered.second for unordered in values} == {VALUE}
    for wait in step.waits.keys() - device:
        _, check = trace(name, lost=device | {wait})
        assert check.unordered.keys() - values or is_implied(wait, name), wait


def whole_device(step):
    """The host's waits for the whole device, without which only values that it reads are early."""
    return frozenset(w for w in step.waits if w.awaited in ("all streams", "the current stream"))


VALUE = "reading a value on host (reads)"
KINDS = {
    "copy": ("to a disk", OUT, "compute"),
    "host thread": ("to a disk", "sppo disk", OUT),
    "message": ("multiplexed", "compute", "communicator pipeline 1 to 0"),
    "collective": ("zero 3", "compute", "communicator gathers of stage"),
}
"""Waits by what they are about: case, who waits, and for whom."""


@pytest.mark.parametrize("kind", default_of(KINDS, "message"))
def test_a_lost_wait_of_each_kind_is_found(kind):
    name, *wait = KINDS[kind]
    step, _ = trace(name)
    lost = frozenset(w for w in step.waits if [w.worker, w.awaited] == wait)
    assert lost
    _, check = trace(name, lost=whole_device(step) | lost)
    assert {unordered.second for unordered in check.unordered} - {VALUE}


def is_implied(wait: Wait, name: str) -> bool:
    found = (name, wait.worker, wait.awaited)
    return any(all(map(fnmatchcase, found, patterns)) for patterns in IMPLIED)


class TestOrderingCheck:
    def setup_method(self):
        self.check, self.one, self.two = OrderingCheck(), Worker("one"), Worker("two")

    def touch(self, worker, *, writes=False, key=7):
        self.check.touch(key, (0, 4), worker=worker, work=worker.work(), writes=writes, what="work")

    @property
    def found(self):
        return self.check.unordered.total()

    @pytest.mark.parametrize("waits", [False, True])
    def test_memory_is_handed_out_behind_what_its_stream_still_does(self, waits):
        self.touch(self.one)
        self.check.handed_out(8, 4, self.one)
        if waits:
            self.two.learn(self.one.clock)
        self.touch(self.two, writes=True, key=8)
        assert self.found == (not waits)

    def test_freed_memory_is_written_next(self):
        self.touch(self.two)
        self.check.freed(7, self.one)
        assert self.found == 1

    def test_memory_that_is_used_again_begins_anew(self):
        self.touch(self.one, writes=True)
        self.check.freed(7, self.one)
        self.touch(self.two, writes=True)
        assert self.found == 0
