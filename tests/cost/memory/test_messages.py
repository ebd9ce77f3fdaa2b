"""Memory of messages: of running units, and those that a rank holds, as the engine's buffers do."""

from collections import deque

import pytest
import torch

from sppo.cost.candidate import Candidate
from sppo.cost.memory.messages import MOST_SENDS, sent_bytes, tokens_held
from sppo.cost.workload import Workload
from sppo.engine.stage_buffers import StageBuffers
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import abstract_costs
from sppo.schedule.program import generate, lower
from tests.planning.cases import machine, run_config

LENGTHS = (13, 8, 24, 5)


class Links:
    """PipelineLinks without peers, which hold sent tensors as gloo makes them."""

    def __init__(self):
        self.sent = {}

    def send(self, tensor, *, receiver, what):
        under_way = self.sent.setdefault(receiver, deque())
        while len(under_way) >= MOST_SENDS:
            under_way.popleft()
        under_way.append(tensor)

    def receive(self, shape, *, dtype, sender, what):
        return Arrived(torch.empty(shape, dtype=dtype))

    def wait_all(self):
        self.sent.clear()


class Arrived:
    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor


def program(schedule, ranks, *, virtual):
    units = 2 * len(LENGTHS)
    costs = abstract_costs(ranks * virtual, num_units=units, backward_s=1.0, weight_s=1.0)
    made = generate(
        schedule,
        num_ranks=ranks,
        num_virtual=virtual,
        lengths=[LENGTHS] * 2,
        costs=costs,
    )
    return lower(made, costs=costs)


def tokens_in(buffers, links, taken):
    """Tokens of all distinct tensors that the buffers, the links and the action hold."""
    tensors = [part for parts in buffers._here.values() for part in parts.values()]
    tensors += [
        arrived.tensor for parts in buffers._expected.values() for arrived in parts.values()
    ]
    tensors += [
        *(part for part, _ in buffers._outgoing.values()),
        *(t for sent in links.sent.values() for t in sent),
    ]
    tensors += [] if taken is None else [taken]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) // 4


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual"),
    [("sppo", 3, 1), ("seq1f1b", 2, 1), ("looped_bfs", 2, 2), ("looped_bfs", 1, 3)]
    + [("sppo_msp", ranks, virtual) for ranks in (2, 3) for virtual in (1, 2)],
)
def test_as_many_tokens_as_the_buffers_hold(schedule, ranks, virtual):
    made = program(schedule, ranks, virtual=virtual)
    assert bool(made.msp_groups) == (schedule == "sppo_msp")
    most = 0
    for rank in range(ranks):
        links = Links()
        buffers = StageBuffers(
            made, rank=rank, p2p=links, local=lambda _, end: end, message=(1, torch.float32)
        )
        tokens = tokens_held(made, rank=rank)
        for action in made.programs[rank]:
            if action.kind is ActionKind.SEND:
                buffers.send(action)
            elif action.kind is ActionKind.RECV:
                buffers.receive(action)
            if action.kind not in (ActionKind.F, ActionKind.B):
                continue
            own, first = LENGTHS[action.unit[1]], 0
            if action.num_shards > 1:
                shards = made.msp_groups[made.slot(action.stage, action.unit)].lengths
                own, first = shards[action.shard], sum(shards[: action.shard])
            buffers.await_input(action)
            taken = buffers.take(action)
            held, _ = next(tokens)
            counted = 0 if taken is None or action.kind is ActionKind.B else own
            assert held + counted == tokens_in(buffers, links, taken), str(action)
            most = max(most, held)
            del taken
            reads = made.num_stages - 1 if action.kind is ActionKind.F else 0
            if action.stage != reads:
                wire = "act" if action.kind is ActionKind.F else "grad"
                buffers.put(wire, action, torch.empty(own, 1), first=first)
    assert most > 0


def test_the_ends_of_a_pipeline_have_one_neighbour():
    model = run_config("llama-3.2-1b").model
    candidate = Candidate(Workload(model, machine()), (256, 128), pipeline_parallel_degree=3)
    row = model.hidden_size * 2
    assert sent_bytes(candidate)[0].tolist() == [
        [2 * 256 * row, 2 * 128 * row],
        [4 * 256 * row, 4 * 128 * row],
        [2 * 256 * row, 2 * 128 * row],
    ]
