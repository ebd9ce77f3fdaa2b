"""Published configurations measured on GPUs: layout as a candidate, step time and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sppo.config.model import ModelConfig
from sppo.config.presets import PRESETS as MODELS
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.state_tiers import StateTiers
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.planning.baseline_methods import ALST, METHODS, Method
from sppo.units import GIB, KIB, MIB, format_bytes

ALST_METHOD = next(method for method in METHODS if method.name == ALST)


@dataclass(frozen=True)
class Published:
    """Configuration that others measured.

    Attributes:
        name: System, model and machine.
        source: Publication of the figures.
        candidate: Layout of the step as a candidate, with one whole sequence per unit.
        recomputed: Shares of (x_in, attention, linear) that backward recomputes.
        measured_s: Measured seconds of a step.
        measured_bytes: Measured peak memory of a device; None if it is not published.
        reasons: Features of the system that the candidate cannot express.
        micro_batch: Number of sequences that a device runs at once.
        layers_held: Number of layers whose activations a device of the first stage holds at once;
            None for all layers of a stage.
        inputs_offloaded: Whether layer inputs are offloaded to host memory.
        method: Method by which memory is counted; None counts the activations of `layers_held`.
        tensor_parallel: Tensor parallel degree t of Megatron without sequence parallelism, which
            saves 10 + 24 / t bytes of activations per token and hidden unit; 0 if the system saves
            the same tensors as SPPO.
    """

    name: str
    source: str
    candidate: Candidate
    recomputed: tuple[float, float, float]
    measured_s: float
    measured_bytes: float | None
    reasons: tuple[str, ...]
    micro_batch: int = 1
    layers_held: int | None = None
    inputs_offloaded: bool = False
    method: Method | None = None
    tensor_parallel: int = 0


def configurations() -> tuple[Published, ...]:
    """Return all published configurations."""
    return (*_torchtitan(), *_megatron(), *_long_sequences())


def _torchtitan() -> tuple[Published, ...]:
    """Return torchtitan's Llama-3.1-8B with FSDP at 8Ki tokens.

    A device runs two sequences on H100, and one on A100.
    """
    source = "torchtitan, docs/performance.md"
    # The H100 of torchtitan have 96 GB of HBM2e at 2.4 TB/s and a power limit of 500 W.
    h100 = _machine("h100", attention="flash_attn_2", memory_bytes_per_s=0.8 * 2.4e12)
    limited = (
        "These H100 draw at most 500 W; our rates for products and attention are of 700 W. "
        "Nothing is published that says how much slower they are.",
    )
    eager = (
        "Without torch.compile each norm, rotation, activation and cast is several kernels; we "
        "count each of these once.",
    )
    logits = (
        "Logits are held whole, in bf16 and fp32 with their gradient: 2 x 8Ki x 128256 x 10 bytes "
        f"= {format_bytes(2 * 8192 * 128256 * 10)}; ours are in tiles.",
        "The peak they report is what the caching allocator reserved, fragments and weights on "
        "their way included.",
    )
    hidden = (
        "Gathers and reductions take multiprocessors and memory bandwidth from the kernels that "
        "they run behind; priced, they cost nothing while they are hidden.",
    )
    rows = []
    for nodes, speed, name, gib, reasons in (
        (1, 5762, "eager, 8 H100", 82.4, (*limited, *eager, *hidden, *logits)),
        (1, 6667, "compiled, 8 H100", 77.0, (*limited, *hidden, *logits)),
        (16, 6514, "compiled, 128 H100", 62.0, (*limited, *hidden, *logits)),
    ):
        cluster = replace(h100, num_nodes=nodes)
        rows.append(
            Published(
                f"torchtitan Llama-3.1-8B 8Ki, FSDP, {name}",
                source,
                _llama(cluster, length=8 * KIB, data=8 * nodes, sequences=2),
                # Selective recomputation keeps every other product.
                (0.0, 0.0, 0.5),
                2 * 8192 / speed,
                gib * GIB,
                reasons,
                micro_batch=2,
            )
        )
    a100 = _machine("a100-80g", attention="flash_attn_2", nodes=8)
    rows.append(
        Published(
            "torchtitan Llama-3-8B 8Ki, FSDP, compiled, 64 A100",
            source,
            _llama(a100, length=8 * KIB, data=64, sequences=1),
            (0.0, 0.0, 0.5),
            8192 / 2973,
            None,
            hidden,
        )
    )
    return tuple(rows)


def _megatron() -> tuple[Published, ...]:
    """Return Megatron's GPT 7B with 8 key/value heads and 131072 words at 8Ki tokens.

    A step has 8 sequences on 8 devices.
    """
    source = "Megatron-LM, functional test gpt3_7b_{}_memory_speed, golden values"
    model = _model(
        "gpt-7b",
        num_kv_heads=8,
        vocab_size=131072,
        tie_embeddings=False,
        position="learned",
        max_positions=8 * KIB,
    )
    deterministic = (
        "Run with --deterministic-mode, --no-gradient-accumulation-fusion, NCCL_ALGO=Ring and 16 "
        "multiprocessors kept free beside norms. Deterministic attention backward is 17 % slower "
        "on a B200 (flash-attention, pull request 2280), and weight gradients go through memory "
        "once more in bf16: together about 0.02 s on H100.",
        "Every step also logs the norm of all parameters and counts zeros in all gradients, and "
        "the host launches kernels for 8Ki or 16Ki tokens at a time. What that costs is not known "
        "to the planner.",
    )
    whole_logits = (
        "Logits of a micro-batch are whole, in fp32 besides: 2 x 8Ki x 131072 / 4 x 6 bytes = "
        f"{format_bytes(2 * 8192 * 131072 / 4 * 6)}.",
    )
    replicated = (
        "Without sequence parallelism norms, residuals and dropout run on all tokens on every "
        "device, where ours run on a quarter of them.",
    )
    rows = []
    for preset, attention, tp_s, gib, pp_s, pp_gib in (
        ("h100", "cudnn", 1.115, 53.2, 1.151, 56.6),
        ("a100-80g", "flash_attn_2", 2.596, None, 2.948, None),
    ):
        hardware = _machine(preset, attention=attention)
        tensor = Published(
            f"Megatron GPT 7B 8Ki, TP 4 DP 2, 8 {preset}",
            source.format("tp4_pp1"),
            _megatron_tensor_parallel(model, hardware),
            (0.0, 0.0, 0.0),
            tp_s,
            None if gib is None else gib * GIB,
            (*deterministic, *replicated, *whole_logits),
            micro_batch=2,
            tensor_parallel=4,
        )
        pipeline = Published(
            f"Megatron GPT 7B 8Ki, PP 4 VPP 8 DP 2, 8 {preset}",
            source.format("tp1_pp4"),
            _megatron_pipeline_parallel(model, hardware),
            (0.0, 0.0, 0.0),
            pp_s,
            None if pp_gib is None else pp_gib * GIB,
            deterministic,
            # Warm-up of interleaved 1F1B on the first of 4 ranks, and the one that begins.
            layers_held=2 * 3 + 7 * 4 + 1,
            tensor_parallel=1,
        )
        rows += [tensor, pipeline]
    return tuple(rows)


def _megatron_tensor_parallel(model: ModelConfig, hardware: HardwareSpec) -> Candidate:
    """Return 4-way tensor parallelism of two replicas, four sequences each."""
    workload = Workload(
        model,
        hardware,
        sequence_parallel_degree=4,
        sequence_parallel="megatron",
        vocabulary_sharded=True,
    )
    return Candidate(workload, (8 * KIB,), sequences=4, data_parallel_degree=2, zero=1)


def _megatron_pipeline_parallel(model: ModelConfig, hardware: HardwareSpec) -> Candidate:
    """Return 4 pipeline ranks of 8 stages each in two replicas, four sequences each."""
    return Candidate(
        Workload(model, hardware),
        (8 * KIB,),
        sequences=4,
        data_parallel_degree=2,
        pipeline_parallel_degree=4,
        virtual_stages=8,
        schedule="interleaved_1f1b",
        zero=1,
    )


def _long_sequences() -> tuple[Published, ...]:
    """Return trainings of one long sequence with whole layers recomputed.

    Layer inputs are in host memory, except in ALST on 8 devices at 1.1M tokens.
    """
    recompute = (0.0, 1.0, 1.0)
    qwen = Workload(
        _model("qwen3-8b"), _machine("h100", attention="cudnn"), sequence_parallel_degree=8
    )
    ring = (
        "Context parallelism passes K and V round a ring: attention of a layer is eight blocks a "
        "device with a merge in between, where ours is one call on all tokens with an eighth of "
        "the heads.",
        "cuDNN's figures are of short runs; products of an H200 lose a tenth when they run long "
        "enough to meet the power limit (755 of 834 TFLOP/s), and attention is most of this step.",
    )
    tiled = (
        "The MLP runs in tiles of the sequence, three times (forward, recomputation, and again in "
        "the tile's backward); priced is twice.",
        "Layer inputs are copied while compute waits, through memory that is not page-locked; "
        "priced are copies that hide.",
    )
    rows = [
        Published(
            "transformers Qwen3-8B 1Mi, FSDP2 + CP 8, 8 H100",
            "accelerate, pull request 4184",
            Candidate(qwen, (MIB,), zero=3),
            recompute,
            373.0,
            56.2e9,
            ring,
            inputs_offloaded=True,
        )
    ]
    flash = _machine("h100", attention="flash_attn_2")
    one = replace(flash, node=replace(flash.node, num_devices=1))
    for length, devices, hardware, measured_s, offloads in (
        (500_000, 1, one, 1010.0, True),
        (1_100_000, 8, flash, 564.0, False),
        (3_700_000, 8, flash, 3_700_000 / 8 / 72, True),
    ):
        workload = Workload(_model("llama-3.1-8b"), hardware, sequence_parallel_degree=devices)
        rows.append(
            Published(
                f"ALST Llama-8B {length / 1e6:g}M tokens, {devices} H100",
                "ALST (arXiv:2506.13996), evaluation",
                Candidate(
                    workload,
                    (length,),
                    zero=3,
                    state=StateTiers(optimizer="host" if devices == 1 else "device"),
                ),
                recompute,
                measured_s,
                None,
                tiled,
                method=ALST_METHOD if offloads else replace(ALST_METHOD, uses_host=False),
            )
        )
    return tuple(rows)


def _model(preset: str, **change: object) -> ModelConfig:
    return ModelConfig.model_validate({"preset": preset, **MODELS[preset], **change})


def _machine(
    preset: str, *, attention: str, nodes: int = 1, memory_bytes_per_s: float | None = None
) -> HardwareSpec:
    """Return a preset with another attention back end, more nodes, or other memory bandwidth."""
    spec = PRESETS[preset]
    device = replace(
        spec.device,
        attention_backend=attention,
        memory_bytes_per_s=memory_bytes_per_s or spec.device.memory_bytes_per_s,
    )
    return replace(spec, device=device, num_nodes=nodes)


def _llama(hardware: HardwareSpec, *, length: int, data: int, sequences: int) -> Candidate:
    workload = Workload(_model("llama-3.1-8b"), hardware)
    return Candidate(workload, (length,), sequences=sequences, data_parallel_degree=data, zero=3)
