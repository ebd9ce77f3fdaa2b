"""Offload store: blocks come back bit for bit, whatever the queues do in the meantime."""

import errno
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule, packed_bytes
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.integrity import CorruptActivationError
from sppo.offload.offload_store import OffloadStore
from sppo.offload.queues.copy_queues import Ordering
from sppo.offload.slots import Slot
from tests.offload.emulated_queues import SCHEDULERS, EmulatedQueues, Lazy
from tests.offload.vector_clocks import RaceError

LAYERS, SUBSEQUENCES, SEQUENCES = 3, 4, 3
LONE = torch.zeros(1)
"""In place of what a layer that offloads nothing does not have."""


@contextmanager
def failing_disk(verb):
    """Every "write" or "read" of a disk tier fails within."""

    def fail(self, offset_bytes, array):
        raise OSError(errno.EIO, "the disk failed")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(FileTier, verb, fail)
        yield


def tensors_of(key, *, step=0):
    """Two tensors whose sizes are no multiples of anything; every third layer offloads nothing."""
    if key.layer == 1:
        return {}
    generator = torch.Generator().manual_seed(hash((step, *key)) % 2**31)
    rows = 5 + 3 * key.subsequence
    return {
        "x_in": torch.randn(rows, 7, generator=generator).bfloat16(),
        "lse": torch.randn(3, rows, generator=generator),
    }


def schedule(order, *, ring_slots=3, staging_slots=3):
    places, end = {}, 0
    for key in sorted(set(order)):
        tensors = tensors_of(key).values()
        size = packed_bytes(t.numel() * t.element_size() for t in tensors)
        places[key] = Extent(end, size)
        end += size
    return OffloadSchedule(places, order, staging_slots=staging_slots, ring_slots=ring_slots)


def unit_keys(sequence, subsequence, *, backward=False):
    layers = range(LAYERS)
    return [
        ActivationKey(sequence, subsequence, layer)
        for layer in (reversed(layers) if backward else layers)
    ]


def program(*, interleaved):
    """(is_forward, sequence, subsequence) of a step, one sequence after another or overlapping."""
    forward = [(True, s, n) for s in range(SEQUENCES) for n in range(SUBSEQUENCES)]
    backward = [(False, s, n) for s in range(SEQUENCES) for n in reversed(range(SUBSEQUENCES))]
    if not interleaved:
        return [
            unit
            for s in range(SEQUENCES)
            for unit in [*(f for f in forward if f[1] == s), *(b for b in backward if b[1] == s)]
        ]
    ahead = SUBSEQUENCES + 2  # as on the first rank of a pipeline of three
    mixed, forward = forward[:ahead], forward[ahead:]
    for unit in backward:
        mixed += [unit, *forward[:1]]
        forward = forward[1:]
    return mixed


@cache
def step_offloads(*, interleaved, staging_slots):
    """The same object every time, as a run gives the same to every step."""
    units = program(interleaved=interleaved)
    order = [k for f, s, n in units if not f for k in unit_keys(s, n, backward=True)]
    return schedule(order, staging_slots=staging_slots)


def run_step(store, *, interleaved, step=0, staging_slots=3, alter=lambda key, tensors: None):
    units = program(interleaved=interleaved)
    store.prepare(step_offloads(interleaved=interleaved, staging_slots=staging_slots))
    done, backwards = set(), [unit for forward, *unit in units if not forward]
    for is_forward, sequence, subsequence in units:
        for key in unit_keys(sequence, subsequence, backward=not is_forward):
            if is_forward:
                store.save(key, tensors_of(key, step=step))
                continue
            taken, wanted = store.take(key), tensors_of(key, step=step)
            alter(key, taken)
            assert taken.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert taken[name].dtype == tensor.dtype
                assert torch.equal(taken[name], tensor), f"{key} {name}"
            store.release(key)
        if is_forward:
            store.finish_offload(unit_keys(sequence, subsequence))
            done.add((sequence, subsequence))
        else:
            backwards.remove([sequence, subsequence])
        for unit in done.intersection(map(tuple, backwards[:2])):  # one ahead, as in a program
            store.start_reload(unit_keys(*unit))
    assert store.num_entries == 0


DIRECTORIES = {"host": None, "disk": Path("anywhere")}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tier", DIRECTORIES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("lag", [0, 1, 5])
def test_every_order_of_copies_brings_back_what_was_sent(scheduler, tier, interleaved, lag):
    queues = EmulatedQueues(SCHEDULERS[scheduler]())
    store = OffloadStore(queues, disk=DIRECTORIES[tier], source_lag=lag, checksums=True)
    for step in range(3):
        run_step(store, interleaved=interleaved, step=step)
    on_disk = {Ordering.WRITTEN_BEFORE_SLOT_REUSE, Ordering.READ_BEFORE_BACK}
    wanted = set(Ordering) if tier == "disk" else set(Ordering) - on_disk
    assert queues.seen >= wanted


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("ordering", list(Ordering), ids=lambda o: f"{o.value} {o.name.lower()}")
def test_no_ordering_can_be_dropped(ordering, scheduler):
    """The checker finds each of the eight missing, whenever the copies happen to run."""
    queues = EmulatedQueues(SCHEDULERS[scheduler](), ignored=ordering)
    store = OffloadStore(queues, disk=DIRECTORIES["disk"])
    with pytest.raises(RaceError, match="nothing (orders the two|was written there before)"):
        run_step(store, interleaved=False)


OF_COMPUTE = {Ordering.PRODUCED_BEFORE_OUT, Ordering.USED_BEFORE_RING_REWRITE}
"""Compute runs at once in these tests: what it does is never late, though nothing ensures it."""


@pytest.mark.parametrize(
    "ordering", [o for o in Ordering if o not in OF_COMPUTE], ids=lambda o: o.name.lower()
)
def test_checksums_find_what_a_dropped_ordering_breaks(ordering):
    """Without the checker: copies as late as can be, released slots poisoned."""
    queues = EmulatedQueues(Lazy(), ignored=ordering, checked=False)
    late = ordering is Ordering.FILLED_BEFORE_READ  # so late that no other ordering steps in
    lag, slots = (50, 50) if late else (0, 3)
    store = OffloadStore(queues, disk=DIRECTORIES["disk"], source_lag=lag, checksums=True)
    with pytest.raises(CorruptActivationError, match=r"(x_in|lse) of layer \d, subsequence \d"):
        run_step(store, interleaved=True, staging_slots=slots)


def test_a_corrupted_tensor_is_named():
    queues = EmulatedQueues(Lazy())
    store = OffloadStore(queues, disk=DIRECTORIES["disk"], checksums=True)
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    for key in unit_keys(0, 0):
        store.save(key, tensors_of(key))
    store.start_reload(unit_keys(0, 0))
    queues.force(queues._pending["write"][-1])
    queues._file[3] ^= 1
    for key in order[:-1]:
        store.take(key)
        store.release(key)
    with pytest.raises(CorruptActivationError, match="x_in of layer 0, subsequence 0, sequence 0"):
        store.take(order[-1])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_step_given_up_anywhere_leaves_the_store_clean(scheduler):
    class GiveUpError(Exception):
        pass

    queues = EmulatedQueues(SCHEDULERS[scheduler]())
    store = OffloadStore(queues, disk=DIRECTORIES["disk"], checksums=True)

    def give_up_at(position):
        count = iter(range(10_000))

        def alter(key, tensors):
            if next(count) == position:
                raise GiveUpError

        return alter

    for position in (0, 1, 7, 20):
        with pytest.raises(GiveUpError):
            run_step(store, interleaved=True, alter=give_up_at(position))
        assert store.num_entries > 0
        store.drain()
        assert store.num_entries == 0
        run_step(store, interleaved=True, step=position)


@pytest.mark.parametrize("queue", ["copy out", "write", "read", "copy back"])
def test_an_error_of_a_disk_reaches_compute(queue):
    count = iter(range(10_000))

    def fail(name):
        if name == queue and next(count) == 5:
            raise OSError(errno.EIO, "the disk failed")

    store = OffloadStore(EmulatedQueues(Lazy(), fail=fail), disk=DIRECTORIES["disk"])
    with pytest.raises(OSError, match="the disk failed"):
        run_step(store, interleaved=False)
    store.drain()
    run_step(store, interleaved=False, step=1)


@pytest.mark.parametrize("verb", ["open_file", "host_memory", "device_memory"])
def test_a_step_without_room_leaves_the_next_its_own(verb, monkeypatch):
    """Smaller steps before and after the one that does not fit."""
    queues = EmulatedQueues(Lazy())
    store = OffloadStore(queues, disk=DIRECTORIES["disk"], checksums=True)
    run_step(store, interleaved=False)
    larger = schedule(step_offloads(interleaved=False, staging_slots=3).order, staging_slots=9)
    extents = {k: Extent(2 * e.offset_bytes, 2 * e.size_bytes) for k, e in larger.extents.items()}

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(queues, verb, refuse)
        with pytest.raises(OSError, match="no room"):
            store.prepare(OffloadSchedule(extents, larger.order, staging_slots=9, ring_slots=9))
    run_step(store, interleaved=False, step=1)


def test_keys_are_taken_in_the_planned_order():
    store = OffloadStore(EmulatedQueues(Lazy()))
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    for key in unit_keys(0, 0):
        store.save(key, tensors_of(key))
    with pytest.raises(AssertionError, match="is taken before"):
        store.take(order[1])
    with pytest.raises(AssertionError, match="stay as they are"):
        store.prepare(schedule(order))


def test_a_unit_has_left_once_all_of_its_layers_are_saved():
    store = OffloadStore(EmulatedQueues(Lazy()))
    first, *others = unit_keys(0, 0)
    store.prepare(schedule(unit_keys(0, 0, backward=True)))
    store.save(first, tensors_of(first))
    with pytest.raises(AssertionError, match=r"layer=1, .*layer=2, .* are not saved yet"):
        store.finish_offload(unit_keys(0, 0))
    for key in others:
        store.save(key, tensors_of(key))
    store.finish_offload(unit_keys(0, 0))


def test_nothing_comes_back_before_it_may():
    store = OffloadStore(EmulatedQueues(Lazy()))
    order = [*unit_keys(0, 1, backward=True), *unit_keys(0, 0, backward=True)]
    store.prepare(schedule(order))
    for key in sorted(order):
        store.save(key, tensors_of(key))
    store.start_reload(unit_keys(0, 1))
    for key in order[:LAYERS]:
        assert torch.equal(store.take(key).get("lse", LONE), tensors_of(key).get("lse", LONE))
        store.release(key)
    with pytest.raises(AssertionError, match="has no ring slot"):
        store.take(order[LAYERS])


def test_a_block_of_another_size_than_planned_is_refused():
    store = OffloadStore(EmulatedQueues(Lazy()))
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    with pytest.raises(AssertionError, match="moves 8192 bytes, planned 4096"):
        store.save(order[0], {"x_in": torch.zeros(2048)})


def test_a_place_that_is_taken_is_refused():
    """Two sequences in flight where the plan has places for one."""
    store = OffloadStore(EmulatedQueues(Lazy()))
    first, second = ActivationKey(0, 0, 0), ActivationKey(1, 0, 0)
    places = dict.fromkeys((first, second), Extent(0, 4096))
    store.prepare(OffloadSchedule(places, [first, second], staging_slots=3, ring_slots=3))
    store.save(first, {"x_in": torch.zeros(1024)})
    with pytest.raises(AssertionError, match="is saved where ActivationKey.* still lies"):
        store.save(second, {"x_in": torch.zeros(1024)})


def test_the_ring_takes_as_many_layers_as_may_be_in_use_at_once():
    """Layers that recompute one another's input are in use together."""
    store = OffloadStore(EmulatedQueues(Lazy()), disk=DIRECTORIES["disk"])
    order = [ActivationKey(0, n, layer) for n in (3, 2, 1, 0) for layer in (2, 0)]
    store.prepare(schedule(order, ring_slots=2 + 3))
    for key in reversed(order):
        store.save(key, tensors_of(key))
    for n in (3, 2, 1, 0):
        store.start_reload(unit_keys(0, n))
    for first in range(0, 6, 3):
        for key in order[first : first + 3]:
            wanted = tensors_of(key)
            assert torch.equal(store.take(key)["lse"], wanted["lse"])
        for key in order[first : first + 3]:
            store.release(key)


def test_k_and_v_are_next_only_at_their_place_and_once_they_may_return():
    store = OffloadStore(EmulatedQueues(Lazy()))
    saved, kv = ActivationKey(0, 0, 0), ActivationKey(0, 0, 0, is_kv=True)
    store.prepare(schedule([saved, kv]))
    for key in (kv, saved):
        store.save(key, tensors_of(key))
    store.start_reload([saved])
    assert store.next_kv is None, "saved tensors come first"
    store.take(saved)
    assert store.next_kv is None, "no H2D yet"
    store.start_reload([kv])
    assert store.next_kv == kv
    store.take(kv)
    assert store.next_kv is None, "nothing is left"


def test_bytes_are_counted_by_class():
    store = OffloadStore(EmulatedQueues(Lazy()), disk=DIRECTORIES["disk"])
    run_step(store, interleaved=False)
    report = store.take_report()
    keys = [k for s in range(SEQUENCES) for n in range(SUBSEQUENCES) for k in unit_keys(s, n)]
    sizes = [{n: t.numel() * t.element_size() for n, t in tensors_of(k).items()} for k in keys]
    wanted = {
        "x_in": sum(size.get("x_in", 0) for size in sizes),
        "attention": sum(size.get("lse", 0) for size in sizes),
    }
    assert report.out_bytes == wanted
    assert report.back_bytes == wanted
    assert report.host_bytes == 3 * 4096
    assert report.device_bytes == 3 * 4096
    assert report.disk_bytes == SEQUENCES * SUBSEQUENCES * 2 * 4096
    assert store.take_report().out_bytes == {}


def test_slots_go_round_in_one_direction():
    store = OffloadStore(EmulatedQueues(Lazy()))
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    (slot, *_) = store._slots.ring
    assert isinstance(slot, Slot)
    assert slot.state == "free"
    for key in unit_keys(0, 0):
        store.save(key, tensors_of(key))
    assert slot.state == "free"
    store.start_reload(unit_keys(0, 0))
    assert slot.state == "filling"
    with pytest.raises(AssertionError, match="nobody has read yet"):
        slot.before_filling()
    store.take(order[0])
    assert slot.state == "reading"
    store.release(order[0])
    assert slot.state == "free"
    with pytest.raises(AssertionError, match="nothing is in it"):
        slot.begin_reading()
