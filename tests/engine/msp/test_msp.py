"""Multiplexed sequence partitioning: shards of units on several ranks, in float64."""

from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sppo.cost.live_sets.shard_live_sets import BORROWED_LAYERS
from sppo.engine.msp.attention import MspAttention
from sppo.engine.msp.shard import MspShard
from tests.engine.models import VARIANTS
from tests.engine.offloading import RatioRows
from tests.engine.pipelined import Case, answers_of, run_case
from tests.engine.test_pipeline import check
from tests.tiers import each_once, exhaustive

CUTS = {
    2: (0, 9, 23),
    4: (0, 9, 14, 21, 30),
    5: (0, 6, 15, 19, 26, 33),
    9: (0, 7, 12, 18, 22, 29, 34, 40, 45, 49),
}


def shards_of(answers):
    """Actions of the first step that are shards."""
    return {a for answer in answers for a in answer[0][4] if "[" in a and a[1] in "FB"}


@pytest.mark.parametrize(("shards", "num_ranks"), each_once(CUTS, [2, 3, 4]))
def test_gradients(ranks, num_ranks, shards):
    case = Case(shape=(1, num_ranks, 1), schedule="sppo_msp", cuts=(CUTS[shards],))
    assert shards_of(check(ranks, case))


@pytest.mark.parametrize(("variant", "policy"), each_once(VARIANTS, ["retain", "recompute"]))
def test_every_model(ranks, variant, policy):
    check(ranks, Case(variant, schedule="sppo_msp", cuts=(CUTS[4],), policy=policy))


@pytest.mark.parametrize(
    "shape", [(1, 2, 4), *exhaustive((1, 2, 2), (1, 3, 2), (2, 2, 1), (2, 2, 2))]
)
@pytest.mark.parametrize("policy", ["keep_attention", *exhaustive("recompute")])
def test_with_sequence_and_data_parallelism(ranks, shape, policy):
    sizes = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_size": 6}
    cuts = ((0, 17, 33, 49, 60),) if shape[2] == 4 else (CUTS[5],)
    case = Case(shape=shape, schedule="sppo_msp", cuts=cuts, policy=policy, sizes=sizes)
    assert shards_of(check(ranks, case))


@pytest.mark.parametrize("shape", [(1, 4, 1), *exhaustive((1, 2, 1), (1, 3, 2))])
def test_what_a_helper_holds_of_others(ranks, shape):
    """Two layers' weights, or a stage's one, and one layer's K/V prefix with its gradient."""
    layers = 1 if shape[1] == 2 else 3
    sizes = {"num_layers": layers * shape[1], "num_heads": 4, "num_kv_heads": 2, "head_size": 6}
    cuts = CUTS[9 if shape[2] == 1 else 5]
    case = Case(shape=shape, schedule="sppo_msp", cuts=(cuts,), sizes=sizes)
    answers = answers_of(ranks, case)
    element_bytes, tokens = 8, cuts[-1]
    prefix_bytes = 2 * tokens * (2 // shape[2]) * 6 * (element_bytes + element_bytes)
    helped = 0
    for rank, answer in enumerate(answers):
        own = case.mesh.coordinates(rank).pipeline
        for stage, held in answer[-1][6].items():
            if stage == own:
                assert held.prefix_bytes == held.layers == 0
                continue
            assert held.layers <= min(BORROWED_LAYERS, layers)
            assert held.prefix_bytes <= prefix_bytes
            helped += held.layers > 0
    assert helped == shape[1] * (shape[1] - 1) * shape[2]


@pytest.mark.parametrize(("shape", "virtual"), each_once([(1, 3, 1), (2, 2, 1)], [2, 3]))
def test_several_stages_on_a_rank(ranks, shape, virtual):
    """One more layer than stages, and at both ends of the looped order units that ranks share."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 6}
    case = Case(
        shape=shape,
        schedule="sppo_msp",
        virtual=virtual,
        cuts=(CUTS[5], CUTS[4]),
        sizes={"num_layers": shape[1] * virtual + 1, **sizes},
        steps=2,
    )
    shards = shards_of(check(ranks, case))
    found = {int(action.split("F")[0]) for action in shards if "F" in action}
    last = shape[1] * virtual - 1
    assert 0 in found
    assert last in found
    assert found <= {*range(shape[1]), *range(last - shape[1] + 1, last + 1)}


@pytest.mark.parametrize("virtual", [2, *exhaustive(1)])
@pytest.mark.parametrize("num_ranks", [2, *exhaustive(3)])
@pytest.mark.parametrize("ratio", [1.0, *exhaustive(0.3)])
def test_with_tensors_moved_to_a_disk(ranks, tmp_path, num_ranks, ratio, virtual):
    sizes = {"num_layers": num_ranks * virtual}
    model = Case(sizes=sizes).model()
    rows = RatioRows(model, 8, ratio, alignment=1)
    case = Case(
        shape=(1, num_ranks, 1),
        schedule="sppo_msp",
        virtual=virtual,
        sizes=sizes,
        cuts=(CUTS[5], CUTS[5]),
        placement_of=rows,
        directory=tmp_path,
        steps=2,
    )
    assert shards_of(check(ranks, case))


class NoIndices(TorchDispatchMode):
    """Refuses index tensors: a host would wait while they are copied to its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("arange", "index", "index_put_", "_index_put_impl_"), name
        return func(*args, **(kwargs or {}))


def without_host_waits(rank, case):
    """A step in which attention uses no indices and no rank holds up its host for the others."""

    def attend(act):
        def watched(self, *arguments):
            with NoIndices():
                return act(self, *arguments)

        return watched

    forward, backward = (attend(getattr(MspAttention, name)) for name in ("_share", "_complete"))
    taken, barrier = attend(MspShard.take), mock.Mock(side_effect=AssertionError("a barrier"))
    with (
        mock.patch.object(MspAttention, "_share", forward),
        mock.patch.object(MspAttention, "_complete", backward),
        mock.patch.object(MspShard, "take", taken),
        mock.patch.object(dist, "barrier", barrier),
    ):
        return len(run_case(rank, case))


def test_no_host_waits_for_another(ranks):
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 6}
    case = Case(shape=(1, 2, 2), schedule="sppo_msp", cuts=((0, 17, 33, 49, 60),), sizes=sizes)
    assert ranks.run(without_host_waits, case, ranks=4) == [1] * 4


def test_the_file_holds_what_a_rank_runs_and_no_more(ranks, tmp_path):
    sizes = {"hidden_size": 128, "mlp_size": 256}
    rows = RatioRows(Case(sizes=sizes).model(), 8, 1.0, alignment=1)
    case = Case(
        schedule="sppo_msp", cuts=(CUTS[5],), placement_of=rows, directory=tmp_path, sizes=sizes
    )
    answers = answers_of(ranks, case)
    assert shards_of(answers)
    for answer in answers:
        copies = answer[-1][8]
        assert copies.total_out_bytes <= copies.disk_bytes <= 1.2 * copies.total_out_bytes
