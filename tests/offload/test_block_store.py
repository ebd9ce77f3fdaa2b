"""Offload store: blocks come back bit for bit, whatever the queues do in the meantime."""

import errno
import os
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.activations.block_layout import packed_bytes
from sppo.offload.block_store import BlockStore
from sppo.offload.disk import file_tier
from sppo.offload.integrity import CorruptActivationError
from tests.offload.emulated_lane import SCHEDULERS, EmulatedLane, Lazy
from tests.offload.vector_clocks import RaceError

LAYERS, SUBSEQUENCES, SEQUENCES = 3, 4, 3
LONE = torch.zeros(1)
"""In place of what a layer that offloads nothing does not have."""


@contextmanager
def failing_disk(verb):
    """Every "write" or "read" of a disk tier fails within."""
    system_io = file_tier._system_io

    def io(file, write, memory, offset_bytes):
        if write == (verb == "write"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return system_io(file, write, memory, offset_bytes)

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(file_tier, "_system_io", io)
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


def run_step(store, *, interleaved, step=0, staging_slots=3):
    units = program(interleaved=interleaved)
    store.prepare(step_offloads(interleaved=interleaved, staging_slots=staging_slots))
    done, backwards = set(), [unit for forward, *unit in units if not forward]
    for is_forward, sequence, subsequence in units:
        for key in unit_keys(sequence, subsequence, backward=not is_forward):
            if is_forward:
                store.put(key, offloaded=tensors_of(key, step=step))
                continue
            (taken, _), wanted = store.get(key), tensors_of(key, step=step)
            assert taken.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert taken[name].dtype == tensor.dtype
                assert torch.equal(taken[name], tensor), f"{key} {name}"
            store.free(key)
        if is_forward:
            done.add((sequence, subsequence))
        else:
            backwards.remove([sequence, subsequence])
        for unit in done.intersection(map(tuple, backwards[:2])):  # one ahead, as in a program
            store.permit(unit_keys(*unit))
    assert store.num_entries == 0


DISK = Path("anywhere")
TIERS = {
    "host": {"disk": None},
    "disk": {"disk": DISK},
    "disk of a cpu": {"disk": DISK, "reads_to_device": True},
}
WAITS = {
    "host": {
        *(("out", "compute"), ("compute", "out"), ("back", "out"), ("compute", "back")),
        ("back", "compute"),
    },
    "disk": {
        *(("out", "compute"), ("compute", "out"), ("write", "out"), ("read", "write")),
        *(("back", "read"), ("compute", "back"), ("back", "compute"), ("out", "write")),
        *(("read", "back"), ("out", "back")),
    },
    "disk of a cpu": {
        *(("out", "compute"), ("compute", "out"), ("write", "out"), ("read", "write")),
        *(("compute", "read"), ("read", "compute"), ("out", "write")),
    },
}
"""Who waits for whom, by tier."""


def made(tier, scheduler, *, lag=1, debug=False, **options):
    """A lane and a store of it."""
    how = dict(TIERS[tier])
    disk = how.pop("disk")
    lane = EmulatedLane(SCHEDULERS[scheduler](), **how, **options)
    return lane, BlockStore(lane, disk=disk, source_lag=lag, debug=debug)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("lag", [0, 1, 5])
def test_every_order_of_copies_brings_back_what_was_sent(scheduler, tier, interleaved, lag):
    lane, store = made(tier, scheduler, lag=lag, debug=True)
    for step in range(3):
        run_step(store, interleaved=interleaved, step=step)
    assert lane.seen >= WAITS[tier] - {("out", "back")}
    assert lane.seen <= WAITS[tier]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("tier", "wait"), [(tier, wait) for tier, waits in WAITS.items() for wait in sorted(waits)]
)
def test_no_wait_can_be_dropped(tier, wait, scheduler):
    """The checker finds each one missing, whenever the copies happen to run."""
    _, store = made(tier, scheduler, ignored=wait)
    with pytest.raises(RaceError, match="nothing (orders the two|was written there before)"):
        run_step(store, interleaved=True)


def test_a_corrupted_tensor_is_named():
    lane = EmulatedLane(Lazy())
    store = BlockStore(lane, disk=DISK, debug=True)
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    for key in unit_keys(0, 0):
        store.put(key, offloaded=tensors_of(key))
    store.permit(unit_keys(0, 0))
    for write in list(lane._pending["write"]):
        lane.force(write)
    lane._bytes[3] ^= 1
    for key in order[:-1]:
        store.get(key)
        store.free(key)
    with pytest.raises(CorruptActivationError, match="x_in of layer 0, subsequence 0, sequence 0"):
        store.get(order[-1])


@pytest.mark.parametrize("queue", ["out", "write", "read", "back"])
def test_an_error_of_a_disk_reaches_compute(queue):
    count = iter(range(10_000))

    def fail(name):
        if name == queue and next(count) == 5:
            raise OSError(errno.EIO, "the disk failed")

    store = BlockStore(EmulatedLane(Lazy(), fail=fail), disk=DISK)
    with pytest.raises(OSError, match="the disk failed"):
        run_step(store, interleaved=False)
    assert store.num_entries > 0
    assert store.close()
    assert store.num_entries == 0


def test_a_closed_store_keeps_no_slot_of_a_block_that_was_on_its_way_back():
    lane, store = made("disk", "lazy")
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    for key in unit_keys(0, 0):
        store.put(key, offloaded=tensors_of(key))
    slots = [weakref.ref(s) for s in (*store._tier.host._slots, *store._ring._slots)]
    store.permit(order)
    assert lane._pending["read"]
    assert store.close()
    assert not any(slot() for slot in slots)


def test_a_file_that_could_not_grow_is_opened_again():
    lane = EmulatedLane(Lazy())
    store, opened, room = BlockStore(lane, disk=DISK), [], 8 * 4096

    def open_file(directory, size_bytes):
        opened.append(size_bytes)
        if size_bytes > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lane.open = open_file
    small, large = (
        schedule([key for n in range(count) for key in unit_keys(0, n)]) for count in (2, 5)
    )
    store.prepare(small)
    with pytest.raises(OSError, match="No space"):
        store.prepare(large)
    assert store.take_report().disk_bytes == 0, "the earlier file is closed first"
    store.prepare(replace(small))
    assert opened == [small.tier_bytes, large.tier_bytes, small.tier_bytes]


def test_steps_of_other_sizes_follow_each_other():
    """A larger one in memory of its own, and a smaller one in the memory of the larger one."""
    store = BlockStore(EmulatedLane(Lazy()), disk=DISK, debug=True)
    for step, staging_slots in enumerate((3, 9, 2)):
        run_step(store, interleaved=True, step=step, staging_slots=staging_slots)


def test_keys_are_taken_in_the_planned_order():
    store = BlockStore(EmulatedLane(Lazy()))
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    for key in unit_keys(0, 0):
        store.put(key, offloaded=tensors_of(key))
    with pytest.raises(AssertionError, match="is taken before"):
        store.get(order[1])
    with pytest.raises(AssertionError, match="stay as they are"):
        store.prepare(schedule(order))


def test_nothing_comes_back_before_it_may():
    store = BlockStore(EmulatedLane(Lazy()))
    order = [*unit_keys(0, 1, backward=True), *unit_keys(0, 0, backward=True)]
    store.prepare(schedule(order))
    for key in sorted(order):
        store.put(key, offloaded=tensors_of(key))
    store.permit(unit_keys(0, 1))
    for key in order[:LAYERS]:
        assert torch.equal(store.get(key)[0].get("lse", LONE), tensors_of(key).get("lse", LONE))
        store.free(key)
    with pytest.raises(AssertionError, match="has no ring slot"):
        store.get(order[LAYERS])


def test_a_block_of_another_size_than_planned_is_refused():
    store = BlockStore(EmulatedLane(Lazy()))
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order))
    with pytest.raises(AssertionError, match="moves 8192 bytes, planned 4096"):
        store.put(order[0], offloaded={"x_in": torch.zeros(2048)})


def test_a_place_that_is_taken_is_refused():
    """Two sequences in flight where the plan has places for one."""
    store = BlockStore(EmulatedLane(Lazy()))
    first, second = ActivationKey(0, 0, 0), ActivationKey(1, 0, 0)
    places = dict.fromkeys((first, second), Extent(0, 4096))
    store.prepare(OffloadSchedule(places, [first, second], staging_slots=3, ring_slots=3))
    store.put(first, offloaded={"x_in": torch.zeros(1024)})
    with pytest.raises(AssertionError, match="is saved where ActivationKey.* still lies"):
        store.put(second, offloaded={"x_in": torch.zeros(1024)})


def test_the_ring_takes_as_many_layers_as_may_be_in_use_at_once():
    """Layers that recompute one another's input are in use together."""
    store = BlockStore(EmulatedLane(Lazy()), disk=DISK)
    order = [ActivationKey(0, n, layer) for n in (3, 2, 1, 0) for layer in (2, 0)]
    store.prepare(schedule(order, ring_slots=2 + 3))
    for key in reversed(order):
        store.put(key, offloaded=tensors_of(key))
    for n in (3, 2, 1, 0):
        store.permit(unit_keys(0, n))
    for first in range(0, 6, 3):
        for key in order[first : first + 3]:
            wanted = tensors_of(key)
            assert torch.equal(store.get(key)[0]["lse"], wanted["lse"])
        for key in order[first : first + 3]:
            store.free(key)


def test_a_staging_slot_that_is_being_read_into_holds_nobody_up():
    """The block of the second layer is read once the first one is used."""
    lane, store = made("disk", "lazy", debug=True)
    order = unit_keys(0, 0, backward=True)
    store.prepare(schedule(order, staging_slots=1))
    for key in unit_keys(0, 0):
        store.put(key, offloaded=tensors_of(key))
    store.permit(order)
    assert [read.done() for read in lane._pending["read"]] == [False]
    for key in order:
        assert torch.equal(store.get(key)[0].get("lse", LONE), tensors_of(key).get("lse", LONE))
        store.free(key)


def test_k_and_v_are_next_only_at_their_place_and_once_they_may_return():
    store = BlockStore(EmulatedLane(Lazy()))
    saved, kv = ActivationKey(0, 0, 0), ActivationKey(0, 0, 0, is_kv=True)
    store.prepare(schedule([saved, kv]))
    for key in (kv, saved):
        store.put(key, offloaded=tensors_of(key))
    store.permit([saved])
    assert store.next_kv is None, "saved tensors come first"
    store.get(saved)
    assert store.next_kv is None, "no H2D yet"
    store.permit([kv])
    assert store.next_kv == kv
    store.get(kv)
    assert store.next_kv is None, "nothing is left"


def test_bytes_are_counted_by_class():
    store = BlockStore(EmulatedLane(Lazy()), disk=DISK)
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
