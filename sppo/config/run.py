"""Sections of a run file. Only keys for model, data and sequence length are required."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from sppo.config.adapter import AdapterConfig
from sppo.config.base import (
    LONGEST_TIMEOUT_S,
    MOST_SAMPLES,
    MOST_SEQUENCES,
    MOST_STEPS,
    MOST_SUBSEQUENCES,
    ComputeDtype,
    Degree,
    Directory,
    Duration,
    Fraction,
    Length,
    Section,
    Size,
    Steps,
    Tokens,
    list_of,
)
from sppo.config.mixture import Sources
from sppo.config.model import ModelConfig
from sppo.config.optimizer import OptimizerConfig
from sppo.config.routing import RoutingConfig
from sppo.config.start import StartConfig
from sppo.config.track import TrackConfig, TrackerName
from sppo.config.validation import HELD_OUT, ValidationConfig, ValidationSet

Cuts = Annotated[
    tuple[Size, ...],
    Field(max_length=MOST_SUBSEQUENCES + 1),
    BeforeValidator(list_of("cuts, such as [0, 5000, 16384]")),
]
Globs = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1),
    BeforeValidator(list_of("globs, such as ['layers.2[4-9].*', '*norm*']")),
]
Auto = Literal["auto"]
ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "seq1f1b",
    "interleaved_seq1f1b",
    "looped_bfs",
    "zb_h1",
    "seq_zb_h1",
    "sppo",
    "sppo_msp",
]
Schedule = Literal["auto", ScheduleName]
WITH_VIRTUAL_STAGES: tuple[ScheduleName, ...] = (
    "interleaved_1f1b",
    "interleaved_seq1f1b",
    "looped_bfs",
    "sppo_msp",
)
"""Schedules that allow several stages on a rank."""


class DataConfig(Section):
    """Token data of a run, and the order in which it is read."""

    tokens: Directory | None = None
    """Directory of training tokens, written by ``sppo data prepare``. Either this key or
    ``sources`` is required."""
    sources: Sources | None = None
    """Sources of a mixture by name, instead of ``tokens``, such as ``{books: {tokens: data/books,
    weight: 60}, code: {tokens: data/code, weight: 40}}``. Each source is read in epochs of its own.
    """
    weights: Literal["tokens", "samples"] = "tokens"
    """Unit of the weights of ``sources``: a source's share of the tokens, with those that do not
    count in the loss, or of the samples. The same for sequences of a stream, all of which have one
    length."""
    eval_tokens: Directory | None = None
    """Directory of held-out tokens for ``sppo eval``; null evaluates on ``tokens`` and reports
    that. Needed to evaluate a run of ``sources``."""
    samples: Literal["stream", "documents"] = "stream"
    """Unit of training data. stream: sequences of ``sequence.length`` tokens, cut from all
    documents one after another; documents: each document whole and by itself, with its own
    positions."""
    shuffle: bool = True
    """Whether the training sequences, or samples, are permuted in each epoch, as a pure function of
    (seed, epoch)."""
    isolate_documents: bool = False
    """Whether attention stops at document boundaries inside a sequence, as it always does between
    samples."""
    label_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the tokens whose label counts, by which plans price the head: it computes no others.
    null: the share in the loss mask, where ``train`` and ``estimate`` find one, otherwise 1."""

    @property
    def directories(self) -> Mapping[str, str]:
        """Directory of each source of training tokens, by the path of the key that names it."""
        if self.sources is None:
            assert self.tokens is not None, "one of the two keys is there: a rule across keys"
            return {"data.tokens": self.tokens}
        return {f"data.sources.{name}.tokens": one.tokens for name, one in self.sources.items()}


class SequenceConfig(Section):
    """Length of a training sequence, and its partition into subsequences."""

    length: Length
    """S: tokens of one training sequence; with ``data.samples=documents``, tokens of the longest
    sample. longest: with ``data.samples=documents``, those of the longest document in the data."""
    longer: Literal["cut", "drop", "refuse"] = "cut"
    """Treatment of a document longer than ``length`` with ``data.samples=documents``. cut: cut into
    consecutive samples of at most ``length`` tokens, each with its own positions; drop: left out;
    refuse: an error before the start, also of chats unless the key is given."""
    num_subsequences: Auto | Annotated[int, Field(ge=1, le=MOST_SUBSEQUENCES)] = "auto"
    """N: number of subsequences that each sequence is cut into. auto: the number that solve
    predicts to be the fastest that fits into memory, with subsequences of at least 1Ki tokens on a
    CPU and 2Ki on a GPU, up to 4Ki and 16Ki on each rank unless longer ones save 1 %; an evaluation
    uses 2Ki and 8Ki."""
    partition: Literal["auto", "flops", "length"] = "auto"
    """Quantity that is equal for all subsequences: model FLOPs, or tokens (length). auto: FLOPs if
    pipeline stages wait for each other, otherwise tokens, which need the least memory."""
    alignment: Tokens = 128
    """Cuts are multiples of this number if N subsequences fit; otherwise it is halved until they
    do."""
    boundaries: Cuts | None = None
    """Explicit cuts, e.g. [0, 5000, 9000, 16384], instead of num_subsequences and partition."""


DEGREES = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")
"""Keys of the degrees of parallelism."""


class ParallelConfig(Section):
    """Degrees of parallelism and the pipeline schedule.

    A degree that is left out is chosen for the devices of the machine, or the ranks of the job.
    """

    data_parallel_degree: Degree = 1
    """Number of replicas. Each trains on other sequences of the same step; gradients are summed."""
    pipeline_parallel_degree: Degree = 1
    """Number of ranks of the pipeline that subsequences pass through; at most the number of
    layers."""
    virtual_stages: Auto | Degree = "auto"
    """Number of stages on each pipeline rank. Subsequences pass through the ranks this many times,
    which divides the idle time of the pipeline by this number. auto: the number
    that solve predicts to be the fastest that fits into memory; 1 with schedules that allow no
    other."""
    sequence_parallel_degree: Degree = 1
    """Number of ranks over which the tokens of every subsequence are sharded."""
    sequence_parallel: Literal["ulysses", "megatron"] = "ulysses"
    """Sharding of a layer over sequence-parallel ranks. ulysses: each rank has whole weights and
    exchanges tokens for heads around attention; megatron: weights are sharded by heads and by the
    width of the MLP, tokens are gathered before the projections and summed after them: a fraction
    of the weights, gradients and optimizer states for more communication."""
    schedule: Schedule = "auto"
    """Order in which stages run units. auto: the fastest schedule in simulation."""
    multiplexed: Literal["auto", "on", "off"] = "auto"
    """Multiplexed sequence partitioning: cut the units next to pipeline bubbles once more, over the
    ranks that would idle. auto: use it if it is predicted to be faster, messages included; on: use
    schedule sppo_msp or fail; off: do not use it."""
    zero: Literal[0, 1, 2, 3] = 1
    """State sharded over ranks with the same weights: 0 none, 1 optimizer states, 2 gradients as
    well, 3 weights as well."""
    timeout_s: float = Field(default=600, ge=1, le=LONGEST_TIMEOUT_S)
    """Seconds that a rank waits for another rank before it fails; ten times as long while
    checkpoints are read and written."""

    @property
    def open_degrees(self) -> tuple[str, ...]:
        """Names of the degrees that are not written, which the solver chooses."""
        return tuple(name for name in DEGREES if name not in self.model_fields_set)

    @property
    def written_ranks(self) -> int:
        """Number of ranks of the written degrees, where those that are not written are 1."""
        return prod(getattr(self, name) for name in DEGREES)


class ActivationsConfig(Section):
    """Placement of saved activations between forward and backward."""

    policy: Literal[
        "auto", "retain", "keep_attention", "recompute", "offload_all", "sppo", "hybrid"
    ] = "auto"
    """Placement of saved tensors. retain: retain all; keep_attention: retain the layer input and
    attention's (o, lse), recompute the linear parts; recompute: retain only the layer input;
    offload_all: offload all; sppo: offload as much as compute hides; hybrid and auto: retain what
    fits, offload what compute hides, recompute the rest."""
    kv: Literal["auto", "retain", "offload", "recompute"] = "auto"
    """Placement of K and V between the forward and the backward of a stage, in the looped order
    with several stages on a rank: retain them, offload them to ``tier``, or recompute them from the
    layer inputs, which the policy must then retain. auto: the faster of retain and offload that
    fits; otherwise recompute, on all stages or on as many as necessary.

    In every order, recompute keeps of layers with a sliding window only the keys and values that
    later subsequences see, and recomputes the others in the backward of each subsequence, whatever
    the policy. auto does so if it is faster than to recompute more saved tensors."""
    input_every: Degree = 1
    """Number of layers from one saved input to the next. The other layers recompute their input
    from the layer below, whose attention output is retained, at the cost of one product of the MLP.
    """
    offload_ratio: Auto | Fraction = "auto"
    """Fraction of the saved bytes of each subsequence but the last that is offloaded."""
    tier: Literal["auto", "device", "host", "disk"] = "auto"
    """Tier of offloaded activations, K and V; device offloads nothing. auto: host memory with a
    GPU, or the directory ``disk`` if host memory is too small; on a CPU the directory ``disk``."""
    host_memory: Auto | Size = "auto"
    """Upper bound of the host memory of one machine, e.g. 64GiB, for offloaded activations,
    training state, and copies of the state that are saved in the background. auto: 0.85 of the free
    memory, or of ``hardware.host_memory``."""
    disk: Directory | None = None
    """Directory on a fast local disk for offloaded activations. The files in it have no name."""
    disk_memory: Auto | Size = "auto"
    """Upper bound of the bytes on the disk for offloaded activations, e.g. 200GiB. auto: the free
    space. In plans for a machine whose description has no disk, the size of an assumed disk."""
    debug: bool = False
    """Whether every offloaded tensor is verified by checksum and released memory is overwritten
    with NaN; slow."""


StateTierChoice = Literal["auto", "device", "host", "disk"]


class StateConfig(Section):
    """Tiers of weights, gradients and optimizer states while nothing computes with them.

    auto: on the device if all of it fits. Otherwise the next tier gets the first of these with
    which a plan fits: frozen weights; optimizer states; gradients, too; all weights, too. host:
    host memory of a GPU; a CPU's memory is host memory already. disk: the directory
    `activations.disk`, with a CPU.
    """

    weights: StateTierChoice = "auto"
    """Tier of the weights in the compute dtype. On host or disk, the device holds the weights of
    one virtual stage and receives those of the next. Frozen weights may leave the device without
    the optimizer; weights that train then stay."""
    gradients: StateTierChoice = "auto"
    """Tier of the fp32 gradient sums of a step. On host or disk, gradients leave the device one
    virtual stage at a time and are updated there."""
    optimizer: StateTierChoice = "auto"
    """Tier of the fp32 master weights and both moments; the optimizer updates them on this tier."""


class TrainConfig(Section):
    """Length of the training, its precision, and the directory of its results."""

    steps: Steps = 100
    """Total number of optimizer steps. A finished run continues if this number is raised."""
    epochs: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Number of epochs of ``data.tokens``, instead of ``steps``: a run has the fewest steps that
    train on every sequence or sample so many times. Whole epochs, or a fraction such as 0.5."""
    sequences_per_step: int = Field(default=1, ge=1, le=MOST_SEQUENCES)
    """B: number of sequences whose gradients are summed in one optimizer step (gradient
    accumulation: every sequence runs by itself)."""
    samples_per_step: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    """Number of samples of one optimizer step, over all replicas; at most 16384, since all samples
    of a step are packed together. With ``data.samples=documents``, either this key or
    ``tokens_per_step`` is required."""
    tokens_per_step: Tokens | None = None
    """Upper bound of the tokens of one optimizer step, over all replicas, with
    ``data.samples=documents``: samples join the step until the next sample would exceed it, or
    until there are 16384, since all samples of a step are packed together."""
    dtype: ComputeDtype = "bf16"
    """Compute dtype of weights and activations; the optimizer keeps fp32 weights."""
    only: Globs | None = None
    """Globs of the names of the parameters that train, such as ``layers.2[4-9].*`` or ``*norm*``;
    all others are frozen. null trains all. ``sppo config parameters`` lists the names; a glob that
    matches none is an error."""
    label_smoothing: float = Field(default=0, ge=0, lt=1)
    """Fraction of a label's weight that is spread evenly over all tokens of the vocabulary."""
    z_loss: float = Field(default=0, ge=0)
    """Weight of the squared log-sum-exp of the logits, which keeps it near zero; 1e-4 is usual. The
    loss that training reports includes label smoothing and z-loss; the loss of an evaluation
    includes neither."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights and of the order of sequences or samples."""
    output: Directory = "runs/default"
    """Directory for metrics, summary, plots and checkpoints; each run needs its own."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """Response to a step whose loss or gradient is NaN or inf: skip its update, or stop the run."""
    max_nonfinite_steps: int = Field(default=5, ge=0)
    """Number of consecutive steps with NaN or inf after which the run stops."""
    restarts: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Most times that ``sppo train`` starts its ranks again, from the newest checkpoint, after one
    of them died, hung or failed; not after bad input, want of room, or a second failure at the same
    step. torchrun and srun have means of their own."""
    shrink: bool = False
    """Whether a run that finds fewer devices than its written degrees need goes on with those that
    are there, with degrees as ``sppo solve`` chooses them. A device that fails twice in a row at
    one step, or computes wrong values, is left out."""
    watch: bool = True
    """Whether every step is watched for values that a device computed or kept wrong: weights by a
    checksum, gradients by figures that stand out, after which the step is computed again and a rank
    that computes other figures ends the run."""
    norms_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Number of steps from one record of the norms of weights and gradients, by kind of parameter,
    in ``metrics.jsonl`` to the next; 0 records none."""
    tensorboard: bool = False
    """Whether to write TensorBoard event files as well, as ``track.to: [tensorboard]`` does (needs
    ``pip install 'sppo[track]'``)."""

    @property
    def beside_cross_entropy(self) -> str:
        """Terms of the training loss besides the cross entropy, as text; "" if there are none."""
        terms = {"label smoothing": self.label_smoothing, "z-loss": self.z_loss}
        return " and ".join(f"{name} {weight:g}" for name, weight in terms.items() if weight)


class PlanningConfig(Section):
    """Planning of each step of ``data.samples=documents``; the steps of a stream are all alike."""

    ahead: bool = True
    """Whether another process plans the next step during a step. false plans each step at its
    beginning; the plans are the same."""
    limit_s: float = Field(default=30, gt=0, le=LONGEST_TIMEOUT_S)
    """Seconds that a step waits for a plan made ahead, at most half of ``parallel.timeout_s``.
    After that a smaller search plans the step, and a line reports it."""
    corrected: bool = False
    """Whether step plans use compute times corrected by measured times of earlier steps, as
    predictions of steps always do. Such plans depend on the clock: the losses of a repeated or
    resumed run agree up to rounding, not to the last bit."""


class CheckpointConfig(Section):
    """Times at which the training state is saved. SIGTERM always saves."""

    every: Auto | Annotated[int, Field(ge=0, le=MOST_STEPS)] = "auto"
    """Number of steps between checkpoints; 0 saves only at the end. auto: the first after
    ten minutes, further ones as often as loses the least time by Daly's formula, from the measured
    seconds of a save (after a restart, of loading) and ``hardware.mean_time_to_failure``."""
    at_end: bool = True
    """Whether to save after the last step; benchmarks use false."""
    keep: Steps = 3
    """Number of newest checkpoints that are kept on disk."""
    async_save: bool = False
    """Whether checkpoints are written in the background while training continues."""
    export: Literal["auto", "none"] = "auto"
    """Whether each checkpoint of a run with ``adapter`` has a directory ``adapter`` with the files
    of PEFT, so that other programs can use it while the run goes on. auto: yes, if these files can
    hold the adapter."""


DEFAULT_MARGIN = 0.03
"""Fraction of a device's memory that plans leave free. Predicted memory was within 2 % of measured
memory."""
_MOST_MARGIN = 0.5


class HardwareConfig(Section):
    """Machine to plan for; ``hardware: auto`` means this machine."""

    preset: str | None = None
    """Name of a built-in machine, such as a100-80g, h100 or laptop-cpu."""
    file: Directory | None = None
    """Description of a measured machine, written by ``sppo bench -o``."""
    nodes: Degree = 1
    """Number of machines of the cluster."""
    devices_per_node: Degree = 8
    """Number of GPUs of each machine; if left out, the number of the preset or file."""
    host_memory: Size | None = None
    """Host memory of each machine, such as 2TiB, for plans; if left out, the size in the preset or
    file. Plans fill up to 0.85 of it, and training up to 0.85 of the host memory that is free."""
    attention: Literal["auto", "cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4"] = "auto"
    """Attention back end whose published rates (bf16) plans on a preset use; auto: the preset's
    default, or what this machine runs if the plan is made when the run starts. A run chooses its
    own back end; one that falls back from the plan's is refused."""
    margin: Annotated[float, Field(ge=0.0, le=_MOST_MARGIN)] = DEFAULT_MARGIN
    """Fraction of a device's memory that plans leave free."""
    mean_time_to_failure: Duration | None = None
    """Mean time from one fault that stops a run to the next, of one device: 50000h, 2000d. null:
    50676h (419 stops in 54 days on 16 384 GPUs: Llama 3), and one more stop a day of every run."""


class RunConfig(Section):
    """One run file, complete and validated."""

    model: ModelConfig
    """Model to train."""
    data: DataConfig
    """Token data to train on."""
    sequence: SequenceConfig
    """Length of sequences, and their partition into subsequences."""
    start: StartConfig | None = None
    """Checkpoint of another run to start from; null starts from random weights or
    ``model.from_hf``."""
    adapter: AdapterConfig | None = None
    """Low-rank adapters (LoRA) to train instead of the weights; null trains the weights."""
    parallel: ParallelConfig = ParallelConfig()
    """Number of ranks, and the distribution of work among them."""
    activations: ActivationsConfig = ActivationsConfig()
    """Placement of activations between forward and backward: retained, offloaded or recomputed."""
    state: StateConfig = StateConfig()
    """Tiers of the training state."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Update of the weights."""
    routing: RoutingConfig = RoutingConfig()
    """Training of the routers of a mixture of experts."""
    train: TrainConfig = TrainConfig()
    """Length, precision and output directory of the training."""
    planning: PlanningConfig = PlanningConfig()
    """Planning of steps of samples."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Times at which the state is saved."""
    validation: ValidationConfig | None = None
    """Sets that are evaluated between steps; null evaluates none."""
    track: TrackConfig = TrackConfig()
    """Experiment trackers that receive the records of the run."""
    hardware: Auto | HardwareConfig = "auto"
    """Machine to plan for; auto: this machine."""

    def with_values(self, values: Mapping[str, object]) -> RunConfig:
        """Return the run with other values of some keys, named ``section.key``, without checks."""
        sections: dict[str, Section] = {}
        for name, value in values.items():
            section, key = name.split(".")
            changed = sections.get(section, getattr(self, section))
            sections[section] = changed.model_copy(update={key: value})
        return self.model_copy(update=sections)

    def with_open_degrees(self) -> RunConfig:
        """Return the run without its written degrees, so that the solver chooses all of them."""
        kept = {name: getattr(self.parallel, name) for name in self.parallel.model_fields_set}
        parallel = ParallelConfig.model_construct(
            **{name: value for name, value in kept.items() if name not in DEGREES}
        )
        return self.model_copy(update={"parallel": parallel})

    @property
    def evaluated_sets(self) -> dict[str, ValidationSet]:
        """Sets that are evaluated between steps, by name; empty without a validation."""
        if self.validation is None:
            return {}
        if not self.validation.sets and self.data.eval_tokens is not None:
            return {HELD_OUT: ValidationSet(tokens=self.data.eval_tokens)}
        return self.validation.sets

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """Names of the trackers that receive the records of the run."""
        by_flag: tuple[TrackerName, ...] = ("tensorboard",) if self.train.tensorboard else ()
        return tuple(dict.fromkeys((*by_flag, *self.track.to)))

    @property
    def initial_weights(self) -> str:
        """Name of the weights that the run starts from, for messages."""
        if self.start is not None:
            return self.start.from_run
        return self.model.from_hf or f"random weights of seed {self.train.seed}"

    @property
    def hf_weights(self) -> str | None:
        """Directory of the Hugging Face weights that the run starts from; None if of others."""
        return None if self.start is not None else self.model.from_hf
