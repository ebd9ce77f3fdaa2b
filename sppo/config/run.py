"""Sections of RUN.yaml. Every key is optional except what names the model, the data, the length."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field

from sppo.config.base import (
    LONGEST_TIMEOUT_S,
    MOST_SAMPLES,
    MOST_SEQUENCES,
    MOST_STEPS,
    MOST_SUBSEQUENCES,
    Degree,
    Directory,
    Fraction,
    Section,
    Size,
    Steps,
    Tokens,
)
from sppo.config.model import ModelConfig

Cuts = Annotated[tuple[Size, ...], Field(max_length=MOST_SUBSEQUENCES + 1)]
Auto = Literal["auto"]


class DataConfig(Section):
    """Token data of a run, and the order in which it is read."""

    tokens: Directory
    """Directory written by ``sppo data prepare``."""
    eval_tokens: Directory | None = None
    """Held-out tokens for ``sppo eval``; null evaluates on ``tokens`` and says so."""
    samples: Literal["stream", "documents"] = "stream"
    """What is trained on. stream: sequences of ``sequence.length`` tokens, cut from all documents
    one after another; documents: every document whole and by itself, with its own positions."""
    shuffle: bool = True
    """Permute the training sequences, or samples, anew each epoch, as a pure function of (seed,
    epoch)."""
    isolate_documents: bool = False
    """Attention stops at document boundaries inside a sequence, as it always does between
    samples."""


class SequenceConfig(Section):
    """The length of a training sequence and how it is cut."""

    length: Tokens
    """S: tokens of one training sequence; of ``data.samples=documents``, of the longest sample."""
    longer: Literal["cut", "drop", "refuse"] = "cut"
    """A document that is longer than ``length``, of ``data.samples=documents``. cut: consecutive
    samples of at most ``length`` tokens, each with its own positions; drop: left out; refuse: an
    error before the start."""
    num_subsequences: Auto | Annotated[int, Field(ge=1, le=MOST_SUBSEQUENCES)] = "auto"
    """N: subsequences each sequence is cut into. auto: as solve finds fastest in the memory there
    is, of 1Ki to 4Ki tokens on a CPU and 2Ki to 16Ki on a GPU; an evaluation takes 2Ki and 8Ki."""
    partition: Literal["auto", "flops", "length", "cost_model"] = "auto"
    """What is equal for all subsequences: model FLOPs, tokens, or predicted time. auto: FLOPs where
    pipeline stages wait for each other, tokens, which need the least memory, where none do."""
    alignment: Tokens = 128
    """Cuts fall on multiples of this where N subsequences fit; halved until they do."""
    boundaries: Cuts | None = None
    """Explicit cuts, e.g. [0, 5000, 9000, 16384]; replaces num_subsequences and partition."""


class ParallelConfig(Section):
    """Degrees of parallelism and the pipeline schedule."""

    data_parallel_degree: Degree = 1
    """Replicas that train on other sequences of the same step; gradients are added up."""
    pipeline_parallel_degree: Degree = 1
    """Ranks through which subsequences flow; at most the number of layers."""
    virtual_stages: Auto | Degree = "auto"
    """Stages of layers on each pipeline rank: subsequences pass the ranks so many times, which
    divides the pipeline's idle time by it. auto: with schedule auto or looped_bfs as many as solve
    finds fastest in the memory there is, else 1."""
    sequence_parallel_degree: Degree = 1
    """Ranks over which the tokens of every subsequence are sharded."""
    sequence_parallel: Literal["ulysses", "megatron"] = "ulysses"
    """How a layer is sharded over sequence-parallel ranks. ulysses: weights whole on each,
    tokens exchanged for heads around attention; megatron: weights sharded by heads and the MLP's
    width, tokens gathered before the projections and added up after, a fraction of the weights,
    gradients and optimizer states for more traffic."""
    schedule: str = "auto"
    """Order in which stages run: gpipe, 1f1b, interleaved_1f1b, seq1f1b, interleaved_seq1f1b,
    looped_bfs, zb_h1, seq_zb_h1, sppo or sppo_msp. auto: the fastest one simulated."""
    multiplexed: Literal["auto", "on", "off"] = "auto"
    """Multiplexed sequence partitioning: cut the units next to pipeline bubbles once more, over the
    ranks that would idle. auto: where that is faster, with its messages priced; on: schedule
    sppo_msp, or nothing."""
    zero: Literal[0, 1, 2, 3] = 1
    """Sharded among ranks with the same weights: 0 nothing, 1 optimizer states, 2 gradients too,
    3 weights too."""
    timeout_s: float = Field(default=600, gt=0, le=LONGEST_TIMEOUT_S)
    """Seconds a rank waits for another before it gives up."""


class ActivationsConfig(Section):
    """Placement of saved activations between forward and backward."""

    policy: Literal[
        "auto", "retain", "keep_attention", "recompute", "offload_all", "sppo", "hybrid"
    ] = "auto"
    """retain: every saved tensor; keep_attention: retain the layer input and attention's (o,
    lse), recompute the linear parts; recompute: retain the layer input only; offload_all:
    offload everything; sppo: offload what hides behind compute; hybrid, and auto: retain what
    fits, offload what hides, recompute the rest."""
    kv: Literal["auto", "retain", "offload", "recompute"] = "auto"
    """K and V between a stage's forward and its backward, in the looped order, where a rank has
    several stages: retain them, offload them to the further tier, or recompute them from the
    layers' inputs, which the policy must then retain. auto: the faster of the first two that fits,
    or else recompute, on all stages or on as many as have to."""
    input_every: Degree = 1
    """Interval in layers between saved inputs: the other layers recompute theirs from the layer
    below, whose attention output is retained, at the price of one product of the MLP."""
    offload_ratio: Auto | Fraction = "auto"
    """Fraction of the bytes saved by every subsequence but the last that is offloaded."""
    tier: Literal["auto", "device", "host", "disk"] = "auto"
    """Tier of offloaded activations, K and V; device offloads none. auto: host memory of a GPU, or
    the directory of ``disk`` where that is too small; on a CPU that directory."""
    host_memory: Auto | Size = "auto"
    """Most host memory of one machine behind its GPUs, e.g. 64GiB, for offloaded activations,
    training state, and copies of it that are saved in the background. auto: what is free."""
    disk: Directory | None = None
    """Directory on a fast local disk, where offloaded activations lie; nothing in it has a name."""
    disk_memory: Auto | Size = "auto"
    """Most bytes on the disk for offloaded activations, e.g. 200GiB. auto: what is free. In plans
    for a machine whose description has no disk, the size of one."""
    debug: bool = False
    """Verify every offloaded tensor by checksum, and overwrite with NaN what is done with; slow."""


StateTierChoice = Literal["auto", "device", "host", "disk"]


class StateConfig(Section):
    """Tiers of weights, gradients and optimizer states while nothing computes with them.

    auto: on the device where that fits, else behind it: first optimizer states, then gradients,
    then weights. host: memory of the host, of a GPU; a CPU's memory is the host's already. disk:
    the directory `activations.disk`, of a CPU.
    """

    weights: StateTierChoice = "auto"
    """Weights in the compute dtype. Behind the device, those of one virtual stage are on it, and
    those of the next on their way."""
    gradients: StateTierChoice = "auto"
    """fp32 sums of the step. Behind the device, they leave it virtual stage by virtual stage, and
    are updated there."""
    optimizer: StateTierChoice = "auto"
    """fp32 masters and both moments, which are updated where they are."""


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=3e-4, ge=0)
    """Learning rate at the peak of the schedule."""
    betas: tuple[
        Annotated[float, Field(ge=0, lt=1)],
        Annotated[float, Field(ge=0, lt=1)],
    ] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to matrices and embeddings, never to biases and norms."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after warm-up, towards ``final_lr_ratio``."""
    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps over which the rate rises to ``lr``."""
    final_lr_ratio: Fraction = 0.0
    """Fraction of ``lr`` that cosine and linear fall to; reached one step after the last, so that
    every step has a rate above 0."""
    offload: bool = False
    """true is another name of ``state.optimizer=host``; false leaves it to that key."""


class TrainConfig(Section):
    """Length of the training, its precision, and the directory of its results."""

    steps: Steps = 100
    """Optimizer steps in all; a finished run goes on when it is raised."""
    sequences_per_step: int = Field(default=1, ge=1, le=MOST_SEQUENCES)
    """B: sequences whose gradients are summed into one optimizer step: gradient accumulation, as
    every sequence runs by itself."""
    samples_per_step: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    """Samples of one optimizer step, over all replicas; of ``data.samples=documents``, which needs
    it or ``tokens_per_step``."""
    tokens_per_step: Tokens | None = None
    """Most tokens of one optimizer step, over all replicas: samples join it until the next one
    would exceed them; of ``data.samples=documents``."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of weights and activations in compute; the optimizer keeps fp32 weights."""
    label_smoothing: float = Field(default=0, ge=0, lt=1)
    """Fraction of a label's weight that all tokens of the vocabulary get alike."""
    z_loss: float = Field(default=0, ge=0)
    """Weight of the squared log-sum-exp of the logits, which keeps it near zero; 1e-4 is usual. The
    loss that training reports has both terms, that of an evaluation neither."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights and of the order of sequences or samples."""
    output: Directory = "runs/default"
    """Directory for metrics, summary, plots and checkpoints; one run each."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """A step whose loss or gradient is NaN or inf: skip its update, or stop the run."""
    max_nonfinite_steps: int = Field(default=5, ge=0)
    """Stop after this many such steps in a row."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written too (needs ``pip install 'sppo[track]'``)."""

    @property
    def beside_cross_entropy(self) -> str:
        """Terms of the loss that training reports beside the cross entropy, "" without any."""
        terms = {"label smoothing": self.label_smoothing, "z-loss": self.z_loss}
        return " and ".join(f"{name} {weight:g}" for name, weight in terms.items() if weight)


class PlanningConfig(Section):
    """Planning of each step of ``data.samples=documents``; steps of a stream are all alike."""

    ahead: bool = True
    """Whether another process plans the next step while a step runs. false plans each step when it
    begins, the same."""
    limit_s: float = Field(default=30, gt=0, le=LONGEST_TIMEOUT_S)
    """Seconds a step waits for a plan that was begun ahead, at most half of ``parallel.timeout_s``;
    then a smaller search plans it, and a line says so."""
    corrected: bool = False
    """Whether steps are planned with seconds of compute corrected by what earlier steps took, as
    predictions of steps always are. Such plans depend on the clock, so that losses of a run that is
    repeated, or goes on from a checkpoint, agree up to rounding and no longer to the last bit."""


class CheckpointConfig(Section):
    """Times at which state is saved. SIGTERM always saves."""

    every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps between checkpoints; 0 saves at the end only."""
    at_end: bool = True
    """Save when all steps are done; false leaves it, as a benchmark wants it."""
    keep: Steps = 3
    """Newest checkpoints that stay on disk."""
    async_save: bool = False
    """Write in the background while training goes on."""


DEFAULT_MARGIN = 0.03
"""Fraction of a device's memory that plans leave free. Memory in closed form was within 2 % of
measured."""
_MOST_MARGIN = 0.5


class HardwareConfig(Section):
    """A machine to plan for; ``hardware: auto`` looks at this one."""

    preset: str | None = None
    """Built-in machine by name, such as a100-80g, h100 or laptop-cpu."""
    file: Directory | None = None
    """Description of a measured machine, written by ``sppo bench -o``."""
    nodes: Degree = 1
    """Machines of the cluster."""
    devices_per_node: Degree = 8
    """GPUs of each machine; left out, as many as the preset or file has."""
    host_memory: Size | None = None
    """Memory of each machine behind its GPUs, such as 2TiB, for plans; left out, the one of preset
    or file. Training takes what is free."""
    attention: Literal["auto", "cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4"] = "auto"
    """Attention back end that plans on a preset are priced with, among those that others measured
    on it, in bf16; auto: the preset's own, see docs/planning.md. Runs choose theirs when they
    start."""
    margin: Annotated[float, Field(ge=0.0, le=_MOST_MARGIN)] = DEFAULT_MARGIN
    """Fraction of a device's memory that plans leave free."""


class RunConfig(Section):
    """One RUN.yaml, complete and checked."""

    model: ModelConfig
    """What is trained."""
    data: DataConfig
    """Which tokens it is trained on."""
    sequence: SequenceConfig
    """How long sequences are, and how they are cut."""
    parallel: ParallelConfig = ParallelConfig()
    """How many ranks share the work, and how."""
    activations: ActivationsConfig = ActivationsConfig()
    """What is retained, offloaded or recomputed between forward and backward."""
    state: StateConfig = StateConfig()
    """Where the state of training lives."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated."""
    train: TrainConfig = TrainConfig()
    """How long, in which precision, and where to."""
    planning: PlanningConfig = PlanningConfig()
    """How steps of samples are planned."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When state is saved."""
    hardware: Auto | HardwareConfig = "auto"
    """Machine that is planned for; auto: this one."""

    def digest(self) -> str:
        """SHA-256 of the canonical JSON form: equal exactly when the configuration is."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
