"""Silent corruption on one of several ranks: the report names this rank, on each rank."""

from unittest import mock

import pytest

from sppo.optim.sharded_state import ShardedState
from sppo.parallel.job.peer_errors import PeerLostError
from sppo.training.interruption import CorruptionError
from sppo.training.trainer import StepLoop
from tests.training.jobs import losses, train_rank

LAYOUTS = {
    "replicas": ["parallel.data_parallel_degree=2", "train.sequences_per_step=2"],
    "pipeline, tied": ["parallel.pipeline_parallel_degree=2"],
    "ulysses": ["parallel.sequence_parallel_degree=2"],
    "megatron": ["parallel.sequence_parallel_degree=2", "parallel.sequence_parallel=megatron"],
}


def trained_with_a_fault(rank, directory, words, *, culprit):
    """Train as one rank; in step 2 the culprit adds one wrong number to a gradient, once."""
    note, step, run, faults = ShardedState._note_added, 0, StepLoop._step, int(rank == culprit)

    def noted(state, key, row):
        nonlocal faults
        if faults and step == 2:
            faults -= 1
            row[7] = 2**20 * (1 + row[7].abs())
        note(state, key, row)

    def stepped(loop, number, *rest):
        nonlocal step
        step = number + 1
        return run(loop, number, *rest)

    with (
        mock.patch.object(ShardedState, "_note_added", noted),
        mock.patch.object(StepLoop, "_step", stepped),
    ):
        try:
            train_rank(rank, directory, words)
        except (CorruptionError, PeerLostError) as error:
            return type(error), str(error)
    return None, ""


def both(ranks, work, words, **fault):
    """Errors of both ranks."""
    return ranks.run(fault_on, work, words, fault, ranks=2)


def fault_on(rank, directory, words, fault):
    """As :func:`trained_with_a_fault`, for the pool of ranks."""
    return trained_with_a_fault(rank, directory, words, **fault)


@pytest.mark.parametrize(
    ("layout", "zero", "culprit"),
    [
        ("replicas", 0, 1),
        ("replicas", 1, 0),
        ("replicas", 3, 1),
        ("pipeline, tied", 1, 0),
        ("pipeline, tied", 1, 1),
        ("ulysses", 2, 1),
    ],
)
def test_the_rank_is_named(ranks, work, run_file, layout, zero, culprit):
    run_file(model={"num_layers": 2, "tie_embeddings": "tied" in layout})
    words = [*LAYOUTS[layout], f"parallel.zero={zero}", "train.steps=3"]
    told = both(ranks, work, words, culprit=culprit)
    assert [kind for kind, _ in told] == [
        CorruptionError if rank == culprit else PeerLostError for rank in range(2)
    ]
    for _, text in told:
        assert text.startswith(f"rank {culprit} computed or kept wrong values")
    assert "step 2: " in told[culprit][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ordinary_steps_have_the_same_losses(ranks, work, run_file, layout):
    run_file(model={"num_layers": 2, "num_heads": 2, "num_kv_heads": 2})
    for watch, output in (("true", "watched"), ("false", "unwatched")):
        words = [*LAYOUTS[layout], f"train.watch={watch}", f"train.output={output}"]
        both(ranks, work, words, culprit=None)
    assert losses(work / "watched") == losses(work / "unwatched")
