"""Engine of one rank: runs the rank's stages over the sequences of a step, as scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from sppo.activations.activation_layout import OffloadSchedule, offload_schedule, order_of_use
from sppo.config.model import ModelConfig
from sppo.config.routing import NO_ROUTING_LOSSES, RoutingConfig
from sppo.cost.candidate import stages_without_backward
from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.engine.arguments import check_engine, check_step
from sppo.engine.attention.kv_store import KVStore
from sppo.engine.executor import Executor
from sppo.engine.expert_loads import ExpertLoads
from sppo.engine.label_losses import LabelLosses
from sppo.engine.msp.providers import ShardProviders
from sppo.engine.pipeline import ALONE, Pipeline
from sppo.engine.providers.gradients import GradientProvider
from sppo.engine.providers.part_rows import PartRows, WeightPart
from sppo.engine.providers.weights import WeightProvider
from sppo.engine.recurrence.state_store import StateStore
from sppo.engine.stage import Stage
from sppo.engine.stage_buffers import StageBuffers
from sppo.engine.stage_providers import StageProviders
from sppo.engine.step_programs import PlannedStep, StepPrograms
from sppo.engine.step_units import StepUnits
from sppo.engine.trace import ExecutedAction, Stopwatch, Trace
from sppo.engine.unit import SequenceData, Unit, units_of
from sppo.kernels.cross_entropy import CROSS_ENTROPY, LossTerms
from sppo.offload.block_store import BlockStore
from sppo.offload.copy_report import CopyReport
from sppo.offload.retained import RetainedTensors
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.partition import lengths_of
from sppo.schedule.actions import COMPUTE_KINDS, Action, ActionKind, UnitKey, sequences_in_flight
from sppo.schedule.msp_groups import msp_ranges
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.copies import kv_placement


@dataclass(frozen=True, slots=True)
class EnginePeaks:
    """Peak bytes on the device by bucket since the last :meth:`Engine.take_peaks`."""

    activations_bytes: int
    """Saved tensors of the layers, gradients of the last layer's output, and operands of deferred
    weight gradients."""
    kv_bytes: int
    """K, V and their fp32 gradients; states of linear attention, or their gradients."""
    pooled_activations_bytes: int
    """The part of `activations_bytes` that torch's own allocator provides."""
    gathered_bytes: int = 0
    """Temporary weights: gathered from shards, or streamed from another tier."""
    whole_gradients_bytes: int = 0
    """Temporary gradients: whole until they are reduced, or streamed to another tier."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and executed actions of one step on this rank."""

    total_loss: Tensor
    """Sum of the token losses on this rank, a float64 scalar; 0 on ranks without the last stage."""
    num_valid: int
    """Number of valid labels of the whole step, over all replicas."""
    schedule: Schedule
    executed: Trace
    losses: tuple[LabelLosses, ...]
    """Losses of the labels of each sequence that this rank computed."""
    expert_loads: Mapping[int, Tensor]
    """Number of this rank's tokens that chose each expert, int64 ``[X]``, of the layers that have a
    backward, by layer; a rank may have layers of other ranks by MSP shards."""

    @property
    def trace(self) -> tuple[ExecutedAction, ...]:
        """All executed actions with their times; the first access waits for the device."""
        return self.executed.actions()

    @property
    def forward_s(self) -> float:
        """Time of all forwards."""
        return self.executed.seconds(ActionKind.F)

    @property
    def backward_s(self) -> float:
        """Time of all backwards, recomputation included."""
        return self.executed.seconds(ActionKind.KV, ActionKind.B, ActionKind.W)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Losses and executed actions of a forward-only program on this rank."""

    losses: tuple[LabelLosses, ...]
    """Losses of the labels of each sequence that this rank computed."""
    executed: Trace


class Engine:
    """Forward and backward of whole sequences, subsequence by subsequence.

    An error in a step closes the engine: the next step needs a new engine, with gradients of zero.

    Args:
        model: Model configuration.
        weights: All parameters of this rank's stages by global name, in the compute dtype, or a
            provider of them. Entries may be replaced between steps, by tensors like them.
        gradients: Buffers of the parameters that train, by global name, to add gradients to, fp32
            (fp64 for fp64), or a provider of them; None for evaluation only.
        policy: Activation policy, see :mod:`sppo.activations.policy`; ignored if `pipeline` has
            placements.
        pipeline: The stages of this rank, their plan, and links to other ranks.
        offloaded: Store for offloaded tensors of this rank; closed with the engine.
        loss_terms: Terms that training adds to the cross entropy; evaluation adds none.
        trainable: Adapters, and parameters that train.
        routing: Losses of the routers of experts.
        choice_biases: Biases by which experts are chosen, by global name, fp32; read in every step.
        stopwatch: Clock of the actions; None uses the host's clock.
        debug: Overwrite memory with NaN when it is released: K/V, states and their gradients of
            a sequence, saved tensors on the stack of a lone stage.

    Raises:
        TypeError: A value of another type.
        ValueError: Weights or gradients do not fit the model, or share memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        weights: Mapping[str, Tensor] | WeightProvider,
        gradients: Mapping[str, Tensor] | GradientProvider | None,
        policy: str = "retain",
        pipeline: Pipeline = ALONE,
        offloaded: BlockStore | None = None,
        loss_terms: LossTerms = CROSS_ENTROPY,
        trainable: Trainable = EVERYTHING,
        routing: RoutingConfig = NO_ROUTING_LOSSES,
        choice_biases: Mapping[str, Tensor] | None = None,
        stopwatch: Stopwatch | None = None,
        debug: bool = False,
    ) -> None:
        check_engine(model, weights, gradients, trainable=trainable, pipeline=pipeline)
        self._model, self._pipeline = model, pipeline
        # Training reads checked data, and does not wait for the device here.
        self._checks_steps = isinstance(weights, Mapping)
        self._stopwatch = stopwatch or Stopwatch()
        # A single stage takes saved tensors in reverse order of saving, so a stack fits. With
        # several stages, the output of one stage is the saved input of the next, without a copy.
        alone = pipeline.placement.num_stages == 1 and pipeline.schedule == ALONE.schedule
        self._store = offloaded or BlockStore()
        self._offloads: tuple[Schedule, OffloadSchedule] | None = None
        if isinstance(gradients, Mapping):
            every = weights if isinstance(weights, Mapping) else None
            gradients = GradientProvider(PartRows.of(gradients, every=every))
        if isinstance(weights, Mapping):
            weights = WeightProvider(PartRows.of(weights))
        self._weights, self._gradients, self._device = weights, gradients, weights.device
        self._stacks = alone and self._weights.device.type == "cpu"
        if self._stacks:
            self._store.retained = RetainedTensors(in_stack=True, poison=debug)
        self._programs = StepPrograms(
            pipeline,
            policy=policy,
            streams_weights=weights.streamed is not None,
            streams_gradients=gradients is not None and gradients.streamed is not None,
            forward_only_stages=stages_without_backward(
                model, trainable, stages=pipeline.all_layers(model)
            ),
        )
        self._is_closed = False
        exchange = pipeline.exchange
        if isinstance(exchange, MegatronSequenceParallel):
            model = exchange.sharding.own_model
        heads = exchange if isinstance(exchange, UlyssesAllToAll) else None
        self._kv = KVStore(
            model,
            dtype=weights.dtype,
            device=weights.device,
            heads=None if heads is None else heads.shard.keys,
            sent=pipeline.msp_links is not None,
            poison=debug,
        )
        self._states = StateStore(self._kv.held, poison=debug)
        self._loads = ExpertLoads(model, weights.dtype, routing, choice_biases or {}, heads)
        self._whole = StageProviders(
            model,
            weights,
            gradients,
            self._store,
            self._kv,
            self._states,
            loss_terms,
            self._loads,
            trainable=trainable,
        )
        stage = partial(Stage, self._model, exchange=exchange)
        self._stages = {
            index: stage(
                layers=layers,
                providers=self._whole,
                input_every=pipeline.input_every,
                recomputes_windows=pipeline.recomputes_windows,
            )
            for index, layers in pipeline.layers(model).items()
        }
        self._shard_stages: dict[int, Stage] = {}
        if pipeline.msp_links is None:
            return
        assert model is self._model, "with Megatron no unit is cut: checked before training"
        for index, layers in enumerate(pipeline.all_layers(model)):
            self._shard_stages[index] = stage(layers=layers, providers=ShardProviders(self._whole))

    @torch.no_grad()
    def accumulate(
        self,
        sequences: Sequence[SequenceData],
        boundaries: Sequence[Sequence[int]],
        *,
        num_valid: int | None = None,
        num_tokens: int | None = None,
        planned: PlannedStep | None = None,
        before_action: Callable[[int, Action], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> StepResult:
        """Add the gradient of the mean loss over all valid labels of the step.

        Without any valid label the gradient and the total loss are 0.

        Args:
            sequences: Sequences of this replica, of any lengths; every rank of the replica must
                pass all of them.
            boundaries: Boundaries of the subsequences of each sequence, from 0 to its length.
            num_valid: Number of valid labels of all replicas; None if this replica is the only one.
            num_tokens: Number of tokens of all replicas, by which losses of routers are averaged;
                None if this replica is the only one.
            planned: Program and placements made for these sequences; None if all steps are alike.
            before_action: Called with the position and the action before each action; an error
                that it raises ends the step.
            on_failure: Called with the error that ends the step, before copies are waited for.

        Returns:
            Loss and executed actions of the step.

        Raises:
            TypeError: A value of another type.
            ValueError: Boundaries that do not tile a sequence, ids beyond the vocabulary, tokens
                without a label each, or another value out of range; nothing is computed then.
        """
        if self._gradients is None:
            raise ValueError("this engine only evaluates; give sppo.Engine gradients to train")
        if self._checks_steps:
            check_step(self._model, sequences, boundaries, num_valid=num_valid, device=self._device)
        if num_valid is None:
            num_valid = sum(data.num_valid for data in sequences)
        if num_tokens is None:
            num_tokens = sum(len(data.tokens_S) for data in sequences)
        self._loads.begin(num_tokens=num_tokens if num_valid else 0)
        units, trace = self._run(
            sequences,
            boundaries,
            loss_scale=1.0 / max(1, num_valid),
            planned=planned,
            before_action=before_action,
            on_failure=on_failure,
        )
        losses = [losses_L.double().sum() for losses_L, _ in self._whole.results.values()]
        nothing = torch.zeros((), dtype=torch.float64)
        return StepResult(
            torch.stack(losses).sum() if losses else nothing,
            num_valid,
            schedule=units.schedule,
            executed=trace,
            losses=self._take_losses(units),
            expert_loads=self._loads.take(),
        )

    def evaluate(self, data: SequenceData, boundaries: Sequence[int]) -> Tensor:
        """Return the loss of each token of one sequence, ``[S]``.

        It is 0 for ignored labels, and for tokens whose loss another rank computes.

        Raises:
            TypeError: A value of another type.
            ValueError: See :meth:`accumulate`.
        """
        (found,) = self.evaluate_together([data], [boundaries]).losses
        losses_S = found.losses_L.new_zeros(data.tokens_S.shape[0])
        losses_S[found.positions_L] = found.losses_L
        return losses_S

    @torch.no_grad()
    def evaluate_together(
        self,
        sequences: Sequence[SequenceData],
        boundaries: Sequence[Sequence[int]],
        *,
        before_action: Callable[[int, Action], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> ForwardResult:
        """Return the losses of all labels of several sequences, which fill a pipeline together.

        Runs the forwards of a step in the order of the run's schedule, and saves nothing. Gradients
        and later steps are as if it had not run.

        Args:
            sequences: Sequences of this replica, as in :meth:`accumulate`.
            boundaries: Boundaries of the subsequences of each sequence.
            before_action: As in :meth:`accumulate`.
            on_failure: As in :meth:`accumulate`.

        Raises:
            TypeError: A value of another type.
            ValueError: See :meth:`accumulate`.
        """
        if self._checks_steps:
            check_step(self._model, sequences, boundaries, num_valid=None, device=self._device)
        units, trace = self._run(
            sequences,
            boundaries,
            loss_scale=None,
            before_action=before_action,
            on_failure=on_failure,
        )
        return ForwardResult(self._take_losses(units), trace)

    def _take_losses(self, units: StepUnits) -> tuple[LabelLosses, ...]:
        """Return the results of all units by sequence, and forget them."""
        nothing = torch.empty(0, device=self._device)
        found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {
            sequence: [(torch.empty(0, dtype=torch.long), nothing, nothing.bool())]
            for sequence, _ in units.units
        }
        for key, results in sorted(self._whole.results.items()):
            found[key[0]].append((units.units[key].labels.positions_L, *results))
        self._whole.results.clear()
        return tuple(
            LabelLosses(*map(torch.cat, zip(*parts, strict=True))) for parts in found.values()
        )

    def schedule(self, lengths: Sequence[Sequence[int]]) -> Schedule:
        """Return the program of a training step of sequences cut into ``lengths``.

        Connects the ranks of each MSP group, so every rank must call it.
        """
        step = self._programs.step(tuple(map(tuple, lengths)), forward_only=False)
        self._connect(step.program)
        return step.program

    def reserve_host(self, boundaries: Sequence[Sequence[int]]) -> None:
        """Take the host memory behind a GPU for a training step, so that no step page-locks it.

        Connects the ranks of each MSP group, so every rank must call it.

        Args:
            boundaries: Boundaries of the subsequences of each sequence, from 0 to its length.

        Raises:
            MemoryError: The host lacks memory.
        """
        if not self._store.offloads:
            return
        no_tokens = [torch.empty(cuts[-1], dtype=torch.long) for cuts in boundaries]
        step, units = self._laid_out([SequenceData(t_S, t_S) for t_S in no_tokens], boundaries)
        self._prepare(step, units, reserve=BlockStore.reserve_host)

    def await_gradients(self) -> None:
        """Block the host until streamed gradients of a step may be read in their tier.

        The device must have finished the step: the wait has no timeout.
        """
        if self._gradients is not None and self._gradients.streamed is not None:
            self._gradients.streamed.arrive()

    def free_unused(self) -> None:
        """Free memory that is kept from step to step: the stack, and buffers of K and V."""
        self._store.retained.close()
        self._kv.close()

    def take_peaks(self) -> EnginePeaks:
        """Return the peaks since the last call, and reset them."""
        peaks = EnginePeaks(
            self._store.retained.held.peak,
            self._kv.held.peak,
            0 if self._stacks else self._store.retained.held.peak,
            self._weights.take_peak_bytes(),
            0 if self._gradients is None else self._gradients.take_peak_bytes(),
        )
        for held in (self._store.retained.held, self._kv.held):
            held.reset_peak()
        return peaks

    def take_copies(self) -> CopyReport:
        """Return the report of copies of offloaded tensors since the last call."""
        return self._store.take_report()

    def close(self) -> None:
        """Free threads, memory and file of the offload store; repeated calls do nothing.

        What copies may still use, because the device does not answer, is kept.
        """
        self._is_closed = True
        if self._store.close():
            self._kv.close()
            self._states.close()
            self._stages.clear()
            self._shard_stages.clear()

    def _run(
        self,
        sequences: Sequence[SequenceData],
        boundaries: Sequence[Sequence[int]],
        *,
        loss_scale: float | None,
        planned: PlannedStep | None = None,
        before_action: Callable[[int, Action], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> tuple[StepUnits, Trace]:
        if self._is_closed:
            raise RuntimeError("this engine is closed, as after an error in a step: make a new one")
        step, units = self._laid_out(
            sequences, boundaries, forward_only=loss_scale is None, planned=planned
        )
        schedule, rank = step.program, self._pipeline.rank
        try:
            if loss_scale is not None:
                self._prepare(step, units)
            with peer_errors("beginning a step"):
                self._weights.begin(self._visits(schedule, units))
            buffers = StageBuffers(
                schedule,
                rank=rank,
                p2p=self._pipeline.p2p,
                local=units.tokens,
                message=(self._model.hidden_size, self._weights.dtype),
            )
            executor = Executor(
                schedule,
                rank=rank,
                units=units,
                buffers=buffers,
                weights=self._weights,
                gradients=self._gradients,
                stopwatch=self._stopwatch,
            )
            trace = executor.run(loss_scale=loss_scale, before_action=before_action)
            for stage in (*self._stages.values(), *self._shard_stages.values()):
                stage.assert_idle()
        except BaseException as error:
            if on_failure is not None:
                on_failure(error)
            self.close()
            for provider in (self._weights, self._gradients):
                if provider is not None and provider.streamed is not None:
                    provider.streamed.close()
            raise
        return units, trace

    def _visits(self, schedule: Schedule, units: StepUnits) -> Iterator[WeightPart]:
        """Yield the weight parts that this rank's units compute with, in order."""
        for action in schedule.programs[self._pipeline.rank]:
            # MSP shards receive their weights from the owner, see SharedWeights.
            if action.kind in COMPUTE_KINDS and action.num_shards == 1:
                stage, unit = units.of(action)
                yield from stage.visits(action.kind, unit)

    def _connect(self, schedule: Schedule) -> None:
        """Connect the ranks of each MSP group that are not connected yet."""
        if self._pipeline.msp_links is not None:
            self._pipeline.msp_links.connect(msp_ranges(schedule.msp_groups))

    def _laid_out(
        self,
        sequences: Sequence[SequenceData],
        boundaries: Sequence[Sequence[int]],
        *,
        forward_only: bool = False,
        planned: PlannedStep | None = None,
    ) -> tuple[PlannedStep, StepUnits]:
        """Return program and units of a step, after connecting the ranks of its MSP groups."""
        pipeline = self._pipeline
        degree = 1 if pipeline.exchange is None else pipeline.exchange.degree
        units: dict[UnitKey, Unit] = {}
        for index, (data, cuts) in enumerate(zip(sequences, boundaries, strict=True)):
            units |= units_of(index, data, cuts, rank=pipeline.member, degree=degree)
        lengths = tuple(lengths_of(tuple(cuts)) for cuts in boundaries)
        step = planned or self._programs.step(lengths, forward_only=forward_only)
        assert step.program.lengths == lengths, "the step was planned for other sequences"
        self._connect(step.program)
        return step, StepUnits(step.program, units, self._stages, self._shard_stages, pipeline)

    def _prepare(
        self,
        step: PlannedStep,
        units: StepUnits,
        *,
        reserve: Callable[[BlockStore, OffloadSchedule], None] = BlockStore.prepare,
    ) -> None:
        """Lay out what each stage saves, reserve memory for it, and prepare the offloads."""
        schedule = step.program
        program = schedule.programs[self._pipeline.rank]
        for stages, is_cut in ((self._stages, False), (self._shard_stages, True)):
            for index, stage in stages.items():
                own = [a for a in program if a.stage == index and (a.num_shards > 1) is is_cut]
                stage.prepare(
                    {a.unit: units.of(a)[1] for a in own if a.kind is ActionKind.B},
                    placements=dict(zip(units.units, chain(*step.placements[index]), strict=True)),
                    sequences_in_flight=sequences_in_flight(own),
                    kv_placement=kv_placement(own),
                )
        if not self._store.offloads:
            return
        if self._offloads is None or self._offloads[0] is not schedule:
            self._offloads = schedule, self._offload_schedule(schedule)
        reserve(self._store, self._offloads[1])  # same object for equal steps: store reuses it

    def _offload_schedule(self, schedule: Schedule) -> OffloadSchedule:
        """Return the offload schedule of all stages, with blocks in the order of their use."""
        layouts = {index: stage.layout for index, stage in self._stages.items()}
        shards = {
            index: stage.layout
            for index, stage in self._shard_stages.items()
            if stage.layout.shards
        }
        order = order_of_use(schedule.programs[self._pipeline.rank], layouts, shards=shards)
        return offload_schedule([*layouts.values(), *shards.values()], order=order)
