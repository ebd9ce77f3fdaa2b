"""One rank's part of a training step of a small model on a grid of ranks, for the rank pool."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from sppo.cost.sharding.heads import tensor_shard
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.engine.providers.gathered_weights import GatheredWeights
from sppo.engine.providers.gradients import ResidentGradients
from sppo.engine.providers.sharded_gradients import ShardedGradients
from sppo.model.gradients import zero_gradients
from sppo.offload.offload_store import OffloadStore
from sppo.offload.queues.thread_queues import ThreadQueues
from sppo.parallel.data_parallel import GradientReducer, add_up
from sppo.parallel.gradient_reduce_scatter import GradientReduceScatter
from sppo.parallel.megatron import MegatronSequenceParallel, WeightSharding
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import MeshShape
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.parameter_all_gather import ParameterAllGather
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.schedule.actions import COMPUTE_KINDS, Action
from tests import tiers
from tests.engine.models import random_sequence, random_weights, tiny_model
from tests.engine.packed_steps import PackedStep
from tests.nccl_rules import await_issued, nccl_rules
from tests.random_training.emulated_ranks import run_emulated
from tests.ranks import RankPool


@dataclass(frozen=True)
class Case:
    """What the ranks do."""

    variant: str = "gqa, q/k-norm"
    shape: tuple[int, int, int] = (1, 2, 1)
    """dp, pp, sp."""
    sequence_parallel: str = "ulysses"
    schedule: str = "sppo"
    virtual: int = 1
    cuts: tuple[tuple[int, ...], ...] = ((0, 4, 9, 17),)
    """Of each sequence of every replica."""
    packed: tuple[tuple[PackedStep, ...], ...] = ()
    """What each replica trains on instead, by step: samples, packed and planned."""
    policy: str = "keep_attention"
    placement_of: Any = None
    """What every stage retains, offloads and recomputes instead; what is offloaded goes to
    :attr:`directory`."""
    directory: str | None = None
    kv_offloaded: tuple[int, ...] = ()
    """Stages whose K and V go there between forward and backward."""
    kv_recomputed: tuple[int, ...] = ()
    """Stages that recompute theirs before their backward."""
    input_every: int = 1
    steps: int = 1
    shared: bool = True
    zero: int = 1
    """2: every rank keeps its own rows of the gradients only; 3: of the weights, too."""
    nccl_rules: Literal["streams", "one stream"] | None = None
    """Let ranks talk as over NCCL (:mod:`tests.nccl_rules`), a stream for each communicator or one
    for all."""
    bucket_bytes: int = 2000
    """Of a reduction: some weights travel together, others alone."""
    sizes: dict[str, Any] = field(default_factory=lambda: {"num_layers": 4})

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(*self.shape, key_copies=self.key_copies)

    @property
    def key_copies(self) -> int | None:
        if self.sequence_parallel == "ulysses" or self.shape[2] == 1:
            return None
        return tensor_shard(self.model(), degree=self.shape[2]).repeats

    def model(self):
        return tiny_model(self.variant, **self.sizes)

    def sequences(self, step: int, replica: int):
        model, count = self.model(), len(self.cuts)
        if self.packed:
            return self.packed[step][replica].sequences(model)
        first = (step * self.shape[0] + replica) * count
        return [
            random_sequence(model, cuts[-1], seed=first + n) for n, cuts in enumerate(self.cuts)
        ]

    def cuts_of(self, step: int, replica: int):
        """Boundaries of the subsequences of each sequence of a replica."""
        return self.packed[step][replica].cuts if self.packed else list(self.cuts)

    def all_sequences(self, step: int):
        """What the step must compute: all sequences, or each sample by itself."""
        if self.packed:
            return [s for own in self.packed[step] for s in own.samples(self.model())]
        return [s for r in range(self.shape[0]) for s in self.sequences(step, r)]


TIMEOUT_S = 30.0


class _Links(threading.local):
    """What a rank made for the cases of a shape; a rank is a process or a thread."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget it."""
        self.key: Any = None
        self.mesh: Any = None
        self.p2p: Any = None
        self.gathers: dict[str, Any] = {}
        """By the name of a group, gathers among its ranks, in a second group of them; None for one
        rank."""


_LINKS = _Links()


def mesh_of(rank: int, case: Case):
    wraps, cuts_units, shape = case.virtual > 1, case.schedule == "sppo_msp", case.mesh
    key = (dist.group.WORLD, shape, wraps, cuts_units, case.nccl_rules)
    if _LINKS.key != key:
        mesh = Mesh(shape, rank=rank, timeout_s=TIMEOUT_S)
        mesh.connect(wraps=wraps, cuts_units=cuts_units, ties_ends=True)
        links = None
        if shape.pipeline_parallel > 1:
            links = PipelineLinks(mesh, device=torch.device("cpu"))
        _LINKS.key, _LINKS.mesh, _LINKS.p2p, _LINKS.gathers = key, mesh, links, {}
    return _LINKS.mesh, _LINKS.p2p


def gathered_weights(weights, groups, shares, mesh):
    """Of ``weights`` only the own rows, and what puts them together.

    Args:
        weights: whole, by name.
        groups: of the ranks that share them out, by name.
        shares: says which group a weight belongs to.
        mesh: makes communicators.
    """
    gathers = {}
    for kind in groups:
        if kind not in _LINKS.gathers:
            group = mesh.gather_group(kind)
            _LINKS.gathers[kind] = group and ParameterAllGather(group, index=group.rank())
    for name in weights:
        kind = shares.replica_group(name)
        if (gather := _LINKS.gathers[kind]) is not None:
            gathers[name] = gather  # one for all, so that a layer travels in one message
    rows = {n: w[groups[shares.replica_group(n)].own_rows(n)].clone() for n, w in weights.items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return GatheredWeights(rows, shapes=shapes, gathers=gathers)


def sharded_gradients(weights, groups, shares, mesh):
    """Zero gradients of the own rows, and what reduces whole ones into them."""
    scatters = {}
    for kind, group, members in same_weights(mesh):
        if group is not None:
            scatter = GradientReduceScatter(group, index=members.index(mesh.rank))
            scatters |= {name: scatter for name in weights if shares.replica_group(name) == kind}
    rows = zero_gradients(
        {n: w[groups[shares.replica_group(n)].own_rows(n)].clone() for n, w in weights.items()}
    )
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return rows, ShardedGradients(rows, shapes=shapes, scatters=scatters)


def exchange_of(case: Case, model, mesh: Mesh):
    """With the ranks that share this one's tokens."""
    group, rank = mesh.groups.sequence, mesh.at.sequence
    if group is None:
        return None
    if case.sequence_parallel == "megatron":
        return MegatronSequenceParallel(group, rank=rank, model=model)
    heads = {"num_heads": model.num_heads, "kv_heads": model.kv_heads}
    return UlyssesAllToAll(group, rank=rank, **heads)


def same_weights(mesh: Mesh):
    """(name, group, members) of the ranks that hold the same of a parameter."""
    groups, shape, at = mesh.groups, mesh.shape, mesh.at
    yield "stage", groups.stage, mesh.stage_ranks
    if shape.key_copies is not None:
        yield "block", groups.block, shape.block_ranks(at)
        yield "keys", groups.keys, shape.block_ranks(at, copies=shape.key_copies)


def disk_store(directory: str) -> OffloadStore:
    return OffloadStore(ThreadQueues(poison=True), disk=Path(directory))


def answers_of(ranks: RankPool, case: Case):
    """What :func:`run_case` returns on each rank of a case.

    Over gloo, in the processes of ``ranks``, with --all and under the rules of NCCL. In the default
    tier ranks are threads of this process, which takes a third of the time, with messages that come
    as late as they may. Steps over gloo are left to whole runs there.
    """
    if tiers.default_tier and case.nccl_rules is None:
        return run_emulated(run_case, case, ranks=case.mesh.num_ranks, seed=0)
    return ranks.run(run_case, case, ranks=case.mesh.num_ranks)


def run_case(rank: int, case: Case):
    """By step: losses, valid labels, own part of gradients, trace, program, peaks, memory."""
    if case.nccl_rules is None:
        return list(_steps(rank, case))
    with nccl_rules(one_stream=case.nccl_rules == "one stream"):
        return list(_steps(rank, case))


def _launch_as_late_as_may_be(index: int, action: Action) -> None:
    """Let compute wait for all that was issued before it, where communicators share a stream."""
    if action.kind in COMPUTE_KINDS:
        await_issued()


def _steps(rank: int, case: Case):
    torch.set_default_dtype(torch.float32)
    model = case.model()
    mesh, links = mesh_of(rank, case)
    at = mesh.at
    cpu = torch.device("cpu")
    msp_links = MspLinks(mesh, device=cpu) if case.schedule == "sppo_msp" else None
    pipeline = Pipeline(
        case.schedule, case.shape[1], at.pipeline, case.virtual, p2p=links, msp_links=msp_links
    )
    everything = random_weights(model)
    exchange = exchange_of(case, model, mesh)
    shares = WeightSharding(model)
    if isinstance(exchange, MegatronSequenceParallel):
        shares = exchange.sharding
    of_stage = {s: shares.shapes(ls) for s, ls in pipeline.layers(model.num_layers).items()}
    shapes = {name: shape for part in of_stage.values() for name, shape in part.items()}
    weights = {name: shares.cut(name, everything[name]) for name in shapes}
    groups = {
        kind: GradientReducer(
            group,
            index=members.index(rank),
            shapes={n: shape for n, shape in shapes.items() if shares.replica_group(n) == kind},
            shards_state=case.shared,
            bucket_bytes=case.bucket_bytes,
        )
        for kind, group, members in same_weights(mesh)
    }

    gradients = zero_gradients(weights)

    def reduce(stage: int) -> None:
        first = of_stage[min(of_stage)]  # a tied embedding is complete with the first stage
        names = [n for n in of_stage[stage] if stage == min(of_stage) or n not in first]
        for kind, group in groups.items():
            group.reduce(gradients, [n for n in names if shares.replica_group(n) == kind])

    provider = ResidentGradients(gradients, reduce=reduce)
    if case.zero >= 2:
        gradients, provider = sharded_gradients(weights, groups, shares, mesh)

    def place(name: str) -> tuple[slice, ...]:
        """Of the rows that are this rank's to update, in the whole parameter."""
        rows = groups[shares.replica_group(name)].own_rows(name)
        first, *rest = shares.offsets(name)
        return (
            slice(first + rows.start, first + rows.stop),
            *(slice(o, o + size) for o, size in zip(rest, shapes[name][1:], strict=True)),
        )

    num_stages = case.shape[1] * case.virtual
    engine = Engine(
        model,
        weights=gathered_weights(weights, groups, shares, mesh) if case.zero == 3 else weights,
        gradients=provider,
        policy=case.policy,
        placements=case.placement_of and dict.fromkeys(range(num_stages), case.placement_of),
        offloaded=disk_store(case.directory) if case.directory else None,
        offloaded_shards={
            stage: disk_store(case.directory)
            for stage in range(num_stages)
            if case.directory and msp_links is not None
        },
        kv_offloaded=case.kv_offloaded,
        kv_recomputed=case.kv_recomputed,
        input_every=case.input_every,
        pipeline=pipeline,
        exchange=exchange,
        debug=True,
    )
    for step in range(case.steps):
        for gradient in gradients.values():
            gradient.zero_()
        sequences, cuts = case.sequences(step, at.data), case.cuts_of(step, at.data)
        evaluated = engine.evaluate(sequences[0], cuts[0]).sum()
        valid = sum(data.num_valid for data in case.all_sequences(step))
        planned = case.packed[step][at.data].planned if case.packed else None
        done = engine.accumulate(
            sequences,
            cuts,
            num_valid=valid,
            planned=planned,
            before_action=_launch_as_late_as_may_be,
        )
        for group in groups.values():
            group.wait()
        if model.tie_embeddings and case.shape[1] > 1 and "embed.weight" in shapes:
            add_up([gradients["embed.weight"]], mesh.groups.ends, what="tied")
        rows = {name: groups[shares.replica_group(name)].own_rows(name) for name in shapes}
        if case.zero >= 2:
            rows = dict.fromkeys(shapes, slice(None))
        yield (
            float(done.total_loss),
            valid,
            {n: (place(n), gradients[n][rows[n]].clone()) for n in shapes},
            [str(executed.action) for executed in done.trace],
            [str(action) for action in done.schedule.programs[at.pipeline]],
            engine.take_peaks(),
            engine.most_shards_held,
            float(evaluated) if at.data == 0 else 0.0,
            engine.take_copies(),
        )
    engine.close()
