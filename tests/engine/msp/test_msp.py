"""Multiplexed sequence partitioning: what ranks hold, move and wait for; numbers are pinned cases.

:mod:`tests.random_training.pinned_cases` has those.
"""

from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from math import prod
from unittest import mock

import pytest
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sppo.cost.live_sets.shard_live_sets import BORROWED_LAYERS
from sppo.cost.parameters import layer_shapes
from sppo.engine.msp.shard import MspShard
from sppo.engine.msp.shared_kv import SharedKV
from sppo.engine.msp.weights import SharedWeights
from tests.random_training.case import Shape
from tests.random_training.emulated_ranks import Distributed
from tests.random_training.pinned_cases import MSP, case
from tests.random_training.training import results_of
from tests.tiers import exhaustive

KEYS_OF_TWO = Shape("qwen3", kv_heads=2, head_size=6)
TEN = (0, 7, 12, 18, 22, 29, 34, 40, 45, 49)
FIVE = (0, 6, 15, 19, 26, 33)


def shards_of(results):
    """Actions of the first step that are shards."""
    return {a for steps in results for a in steps[0].program if "[" in a and a[1] in "FB"}


@pytest.mark.parametrize(
    "name", ["shared tokens", "stages of a rank", *exhaustive("all axes", "offloading")]
)
def test_units_of_the_pinned_cases_are_cut(name, tmp_path):
    """At both ends of the order, where a rank has several stages."""
    one = MSP[name]
    (leg,) = one.legs
    found = {
        int(a.split("F")[0]) for a in shards_of(results_of(one, disk=str(tmp_path))) if "F" in a
    }
    last = leg.num_stages - 1
    assert {0, last} <= found <= {*range(leg.pp), *range(last - leg.pp + 1, last + 1)}


class Borrowed:
    """Most bytes alive at once of what borrowers allocate, by kind, borrower and owner."""

    def __init__(self):
        self._alive = defaultdict(list)
        self.most_bytes = Counter()

    def counting(self, kind, allocate):
        def call(self_, *arguments):
            made = allocate(self_, *arguments)
            exchange = self_._exchange
            if not exchange.is_owner:
                self._note(kind, exchange, made if isinstance(made, tuple) else (made,))
            return made

        return call

    def _note(self, kind, exchange, tensors):
        key = kind, exchange._ranks[exchange.shard_index], exchange._ranks[exchange.owner]
        self._alive[key] += [(StorageWeakRef(t.untyped_storage()), t.nbytes) for t in tensors]
        self._alive[key] = [pair for pair in self._alive[key] if not pair[0].expired()]
        held = sum(size for _, size in self._alive[key])
        self.most_bytes[key] = max(self.most_bytes[key], held)


@pytest.mark.parametrize(
    "setting", [(4, 1, None), (2, 1, 4), *exhaustive((2, 1, None), (3, 2, None))], ids=str
)
def test_what_a_helper_holds_of_others(setting):
    """Two layers' weights, or a stage's one, and one layer's K/V prefix with its gradient.

    Of the prefix, it holds only the keys inside the window of the unit's first query.
    """
    pp, sp, window = setting
    layers = 1 if pp == 2 else 3
    cuts = TEN if sp == 1 else FIVE
    keys = replace(KEYS_OF_TWO, window=window)
    one = case(keys, layers * pp, pp=pp, sp=sp, schedule="sppo_msp", cuts=cuts)
    element_bytes = 8
    seen = max(end - max(0, start - (window or end) + 1) for start, end in pairwise(cuts))
    prefix_bytes = 2 * seen * (2 // sp) * 6 * (element_bytes + element_bytes)
    model = one.model.config()
    layer_bytes = element_bytes * sum(map(prod, layer_shapes(model, 0).values()))
    borrowed, most = Borrowed(), {"weights": min(BORROWED_LAYERS, layers) * layer_bytes}
    with (
        mock.patch.object(
            SharedWeights,
            "_empty_row",
            borrowed.counting("weights", SharedWeights._empty_row),
        ),
        mock.patch.object(SharedKV, "_empty", borrowed.counting("kv", SharedKV._empty)),
    ):
        results_of(one)
    for (kind, *_), held in borrowed.most_bytes.items():
        assert held <= most.get(kind, prefix_bytes)
    helped = [pair for kind, *pair in borrowed.most_bytes if kind == "weights"]
    assert len(helped) == pp * (pp - 1) * sp


class NoIndices(TorchDispatchMode):
    """Refuses index tensors: a host would wait while they are copied to its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("arange", "index", "index_put_", "_index_put_impl_"), name
        return func(*args, **(kwargs or {}))


def without_indices(act):
    """The function with nothing in it that makes or uses an index tensor."""

    def watched(self, *arguments):
        with NoIndices():
            return act(self, *arguments)

    return watched


def test_no_host_waits_for_another():
    """Attention uses no indices, and no rank holds up its host at a barrier."""
    one = case(KEYS_OF_TWO, 2, pp=2, sp=2, schedule="sppo_msp", cuts=(0, 17, 33, 49, 60))
    with ExitStack() as stack:
        for where, name in (
            (SharedKV, "write"),
            (SharedKV, "complete"),
            (MspShard, "take"),
        ):
            watched = without_indices(getattr(where, name))
            stack.enter_context(mock.patch.object(where, name, watched))
        barrier = mock.patch.object(Distributed, "barrier", side_effect=AssertionError)
        stack.enter_context(barrier)
        assert len(results_of(one)) == 4


def test_the_file_holds_what_a_rank_runs_and_no_more(tmp_path):
    wide = Shape("qwen3", 4, hidden=128, kv_heads=2, head_size=6, mlp_size=256)
    one = case(wide, pp=2, schedule="sppo_msp", ratio=1.0, cuts=FIVE)
    for steps in results_of(one, disk=str(tmp_path)):
        copies = steps[-1].copies
        assert 0 < copies.total_out_bytes <= copies.disk_bytes <= 1.2 * copies.total_out_bytes
