"""One rank's part of one leg of a training, run as the trainer does; returns blocks of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sppo.activations.policy import policy_placement
from sppo.activations.subsequence_placement import PlacementOf
from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.state_block import StateBlock
from sppo.config.model import ModelConfig
from sppo.cost.communicators import CommunicatorUse
from sppo.engine.engine import Engine
from sppo.engine.label_losses import LabelLosses
from sppo.engine.pipeline import Pipeline
from sppo.engine.providers.streamed_rows import StreamedGradients
from sppo.model.gradients import zero_gradients
from sppo.offload.block_store import BlockStore
from sppo.optim.adamw import AdamW
from sppo.optim.gradient_norm import clip_
from sppo.optim.learning_rate import learning_rate
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.mesh import Mesh, alone
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.training.state import used_weights
from tests.engine.offloading import RatioRows, lane_of
from tests.engine.streaming import LateLane
from tests.random_training.case import DTYPES, Case, Leg
from tests.random_training.samples import planned_samples

Blocks = dict[str, list[StateBlock]]
"""Parts of the whole model's tensors, by name."""


@dataclass(frozen=True)
class StepResult:
    """What one rank has of one step."""

    replica: int
    loss: float
    norm: float
    losses: tuple[LabelLosses, ...]
    """Its part of those of each sequence of the replica."""
    evaluated: tuple[LabelLosses, ...]
    """The same from a program without backwards, before the step; empty: not evaluated."""
    gradients: Blocks
    weights: Blocks
    """After the step, in the compute dtype."""
    state: Blocks
    """Masters and moments after the step."""
    executed: tuple[str, ...]
    program: tuple[str, ...]
    peaks: Any
    """Bytes that the engine held at most."""
    copies: Any
    """What moved to the other tier and back."""


def run_leg(
    rank: int, case: Case, number: int, state: Mapping[str, Tensor], disk: str
) -> list[StepResult]:
    """Every step of leg ``number`` on ``rank``.

    Args:
        rank: of the grid.
        case: the training.
        number: of the leg.
        state: of the optimizer, whole, as a checkpoint has it.
        disk: directory of a disk tier.
    """
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        return list(_Rank(rank, case, number, state, disk).steps())


class _Rank:
    def __init__(
        self, rank: int, case: Case, number: int, state: Mapping[str, Tensor], disk: str
    ) -> None:
        self._case, self._number, self._leg = case, number, case.legs[number]
        leg, model = self._leg, case.model.config()
        mesh = alone()
        if leg.num_ranks > 1:
            mesh = Mesh(leg.mesh_shape(model), rank=rank, timeout_s=30.0).connect(
                CommunicatorUse(
                    wraps=leg.virtual > 1,
                    cuts_units=leg.schedule == "sppo_msp",
                    ties_ends=model.tie_embeddings,
                )
            )
        self._mesh, self._peers = mesh, HostCollectives(mesh.groups.world)
        cpu = torch.device("cpu")
        links = PipelineLinks(mesh, device=cpu) if mesh.groups.edges else None
        msp_links = MspLinks(mesh, device=cpu) if leg.schedule == "sppo_msp" else None
        dtype = DTYPES[case.dtype]
        pipeline = Pipeline(
            leg.schedule,
            leg.pp,
            mesh.at.pipeline,
            leg.virtual,
            p2p=links,
            placements=dict.fromkeys(range(leg.num_stages), rows_of_leg(leg, model, dtype)),
            kv_offloaded=leg.kv_offloaded,
            kv_recomputed=leg.kv_recomputed,
            recomputes_windows=leg.recomputes_windows,
            msp_links=msp_links,
            input_every=leg.input_every,
            exchange=_exchange(leg, model, mesh),
        )
        shared = ShardedState(
            model,
            mesh=mesh,
            pipeline=pipeline,
            device=cpu,
            zero=leg.zero,
            trainable=case.trainable,
            bucket_bytes=leg.bucket_bytes,
        )
        self._weights = {
            key: torch.zeros(shape, dtype=dtype) for key, shape in shared.weight_shapes.items()
        }
        masters: dict[str, Tensor] = {}
        for name in shared.shapes:
            wide = shared.sharding.cut(name, state[MODEL_PREFIX + name].clone())
            shared.fill(self._weights, name, wide)
            if dtype is torch.bfloat16:
                masters |= shared.owned_of(name, wide)
        kept = {n: torch.empty(shape, dtype=dtype) for n, shape in shared.gradient_shapes.items()}
        self._gradients = zero_gradients(kept)
        self._optimizer = AdamW(
            shared.owned(self._weights), config=case.optimizer, masters=masters or None
        )
        self._resume(shared, state)
        self._shared = shared
        how = {"stages": shared.keys_of_stages, "device": cpu, "lane": LateLane()}
        weights = used_weights(self._weights, shared, leg.tiers, **how)
        sums = StreamedGradients(self._gradients, **how) if "gradients" in leg.streams else None
        self._engine = Engine(
            model,
            weights=shared.provider(weights),
            gradients=shared.gradient_provider(self._gradients if sums is None else sums),
            offloaded=_store(leg, disk) if leg.tier else None,
            pipeline=pipeline,
            loss_terms=case.terms,
            trainable=case.trainable,
            routing=case.routing,
            choice_biases=case.choice_biases,
            debug=leg.debug,
        )

    def steps(self) -> Iterator[StepResult]:
        try:
            for step in range(self._leg.steps):
                yield self._step(step)
        finally:
            self._engine.close()

    def _step(self, step: int) -> StepResult:
        case, leg, shared, gradients = self._case, self._leg, self._shared, self._gradients
        planned = None
        if case.samples is None:
            everything = case.sequences(self._number, step)
            first = self._mesh.at.data * leg.replica_sequences
            own = everything[first : first + leg.replica_sequences]
            cuts = [leg.cuts_of(sequence) for sequence in range(len(own))]
        else:
            replicas = planned_samples(case, self._number, step)
            everything = [data for sequences, _, _ in replicas for data in sequences]
            own, cuts, planned = replicas[self._mesh.at.data]
        evaluated: tuple[LabelLosses, ...] = ()
        if leg.evaluates:
            evaluated = self._engine.evaluate_together(own, cuts).losses
        for gradient in gradients.values():
            gradient.zero_()
        done = self._engine.accumulate(
            own,
            cuts,
            num_valid=sum(data.num_valid for data in everything),
            num_tokens=sum(len(data.tokens_S) for data in everything),
            planned=planned,
        )
        self._engine.await_gradients()
        shared.finish(gradients)
        norm = shared.norm(gradients, self._peers)
        (loss,) = self._peers.total([float(done.total_loss)])
        own_gradients = shared.owned(gradients)
        named = {MODEL_PREFIX + name: gradient for name, gradient in own_gradients.items()}
        computed = _copied(shared.blocks(named))
        lr = learning_rate(step, config=case.optimizer, total_steps=100)
        clip_(own_gradients, norm=norm, clip_norm=case.clip_norm)
        self._optimizer.step(own_gradients, lr=lr)
        shared.gather(self._weights)
        return StepResult(
            self._mesh.at.data,
            loss / done.num_valid,
            float(norm),
            done.losses,
            evaluated,
            computed,
            _copied(shared.weight_blocks(self._weights)),
            _copied(shared.blocks(self._optimizer.state())),
            tuple(str(executed.action) for executed in done.trace),
            tuple(map(str, done.schedule.programs[self._mesh.at.pipeline])),
            self._engine.take_peaks(),
            self._engine.take_copies(),
        )

    def _resume(self, shared: ShardedState, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of ``state``."""
        live = self._optimizer.state()
        for key, blocks in shared.blocks(live).items():
            for block in blocks:
                block.tensor.copy_(state[key][places(block)])
        self._optimizer.load_state(live)
        shared.gather(self._weights)


def places(block: StateBlock) -> tuple[slice, ...]:
    """Where a block lies in its tensor."""
    return tuple(
        slice(first, first + size)
        for first, size in zip(block.offsets, block.tensor.shape, strict=True)
    )


def _copied(blocks: Blocks) -> Blocks:
    return {
        name: [replace(block, tensor=block.tensor.detach().clone()) for block in own]
        for name, own in blocks.items()
    }


def rows_of_leg(leg: Leg, model: ModelConfig, dtype: torch.dtype) -> PlacementOf:
    """What every stage retains, offloads and recomputes."""
    if not leg.tier:
        return policy_placement(leg.policy)
    return RatioRows(
        model,
        dtype.itemsize,
        leg.ratio,
        rest=leg.policy,
        last_too=leg.last_too,
        input_every=leg.input_every,
    )


def _store(leg: Leg, disk: str) -> BlockStore:
    directory = Path(disk) if leg.tier == "disk" else None
    return BlockStore(lane_of(leg.queues), disk=directory, source_lag=leg.lag, debug=leg.debug)


def _exchange(leg: Leg, model: ModelConfig, mesh: Mesh) -> Any:
    group, rank = mesh.groups.sequence, mesh.at.sequence
    if group is None:
        return None
    if leg.sequence_parallel == "megatron":
        return MegatronSequenceParallel(group, rank=rank, model=model)
    return UlyssesAllToAll(group, rank=rank, num_heads=model.num_heads, kv_heads=model.kv_heads)
