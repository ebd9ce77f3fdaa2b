"""One random training: everything that decides what it computes, in one line that can be pasted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from sppo.config.model import ModelConfig
from sppo.config.optimizer import OptimizerConfig
from sppo.config.routing import RoutingConfig
from sppo.cost.parameters import choice_bias_shapes
from sppo.cost.sharding.heads import tensor_shard
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.cost.trainable import Adapter as Adapter  # a case that is pasted names it
from sppo.engine.unit import SequenceData
from sppo.kernels.cross_entropy import LossTerms
from sppo.kernels.labels import IGNORED_LABEL
from sppo.parallel.mesh_shape import MeshShape

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

_GPT = {
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "position": "learned",
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "max_positions": 128,
}
_LINEAR = {"type": "linear", "factor": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mistral": {},
    "gpt2": _GPT,
    "layernorm, rotary, q/k-norm, gelu": {
        "norm": "layernorm",
        "qk_norm": True,
        "mlp": "gelu",
        "output_bias": True,
    },
    "learned positions, q/k-norm": {"position": "learned", "qk_norm": True, "max_positions": 128},
    "olmo": {
        "norm_placement": "post",
        "qk_norm": "all",
        "sliding_window": 4,
        "layer_types": ("sliding", "full"),
        "sliding_rope_theta": 10_000.0,
        "rope_scaling": _LINEAR,
    },
    "gemma": {
        "norm_placement": "both",
        "norm_offset": True,
        "qk_norm": "head",
        "mlp": "geglu_tanh",
        "sliding_window": 3,
        "layer_types": ("sliding", "full"),
        "sliding_rope_theta": 20.0,
        "attention_scale": 0.31,
        "embedding_scale": 3.45,
        "tie_embeddings": True,
    },
    "gpt-oss": {
        "mlp": "swiglu_clamped",
        "mlp_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "attention_sinks": True,
        "sliding_window": 3,
        "layer_types": ("sliding", "full"),
    },
    "granite": {
        "mlp": "relu2",
        "rotary_layers": (True, False),
        "attention_scale": 0.15,
        "embedding_scale": 2.5,
        "residual_scale": 0.6,
        "logits_scale": 0.4,
    },
    "glm": {
        "norm_placement": "both",
        "qkv_bias": True,
        "residual_scale": 1.3,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "softmax": {"count": 5, "per_token": 2, "mlp_size": 7, "normalize": True},
    "gpt-oss": {
        "count": 4,
        "per_token": 2,
        "mlp_size": 9,
        "score": "softmax_chosen",
        "bias": True,
        "router_bias": True,
    },
    "glm": {
        "count": 6,
        "per_token": 2,
        "mlp_size": 7,
        "score": "sigmoid",
        "normalize": True,
        "scale": 2.5,
        "groups": 3,
        "groups_per_token": 2,
        "shared_mlp_size": 5,
        "choice_bias": True,
        "dense_layers": 1,
    },
    "qwen2": {
        "count": 6,
        "per_token": 3,
        "mlp_size": 5,
        "shared_mlp_size": 9,
        "shared_switch": True,
    },
}
LINEAR_ATTENTION = {
    "key_heads": 4,
    "value_heads": 8,
    "key_size": 6,
    "value_size": 3,
    "conv_size": 4,
}
ROPES = {
    "": None,
    "linear": _LINEAR,
    "llama3": {"type": "llama3", "factor": 4.0, "original_max_positions": 16},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_positions": 16},
}


class _Short:
    """Its repr leaves out what is as usual."""

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


_TYPES = {"s": "sliding", "f": "full", "l": "linear"}


@dataclass(frozen=True, repr=False)
class Shape(_Short):
    """The model."""

    family: str = "llama"
    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 4
    mlp_size: int = 24
    vocab_size: int = 23
    tied: bool = False
    window: int | None = None
    window_from: int = 0
    """First layer with the window."""
    pattern: str = ""
    """Layers with the window, s, without, f, and with linear attention, l: such as ssf or llf."""
    gated: bool = False
    """Whether attention has a gate of its output."""
    rope: str = ""
    norm_eps: float = 1e-5
    rotary: float = 1.0
    """Share of a head that is rotated."""
    experts: str = ""
    """Of `EXPERTS`; "": no layer has any."""

    @property
    def has_linear_attention(self) -> bool:
        """Whether some layers have linear attention."""
        return "l" in self.pattern

    def config(self) -> ModelConfig:
        family = FAMILIES[self.family]
        own: dict[str, Any] = {}
        if self.window is not None:
            own["sliding_window"] = self.window
            if not self.pattern and "layer_types" not in family:
                own["sliding_window_first_layer"] = self.window_from
        if self.pattern:
            own["layer_types"] = [_TYPES[letter] for letter in self.pattern]
        if self.has_linear_attention:
            own["linear_attention"] = LINEAR_ATTENTION
        if self.rope:
            own["rope_scaling"] = ROPES[self.rope]
        if self.experts:
            own["experts"] = EXPERTS[self.experts]
        return ModelConfig.model_validate(
            {
                **family,
                **own,
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden,
                "num_layers": self.layers,
                "num_heads": self.heads,
                "num_kv_heads": self.kv_heads,
                "head_size": self.head_size,
                "mlp_size": self.mlp_size,
                "tie_embeddings": self.tied,
                "attention_gate": self.gated,
                "norm_eps": self.norm_eps,
                "rotary_fraction": self.rotary,
            }
        )


@dataclass(frozen=True, repr=False)
class Samples(_Short):
    """Documents that a training takes as samples."""

    documents: tuple[int, ...] = (9, 4, 30)
    """Tokens of each."""
    longest: int = 16
    """Tokens of the longest sample."""
    longer: str = "cut"
    """What becomes of documents beyond it: cut or drop."""
    samples_per_step: int = 0
    tokens_per_step: int = 0
    """One of the two says how large a step is."""
    mixed: bool = False
    """Whether every unit has a level of its own instead of what the policy decides."""
    pace: float | None = None
    """Share of the forwards that the schedule begins ahead; None: as it is planned."""


@dataclass(frozen=True, repr=False)
class Leg(_Short):
    """Some steps on one grid of ranks; the state goes on to the next leg."""

    steps: int = 1
    cuts: tuple[int, ...] = (0, 16)
    """Of every sequence, from 0 to its length."""
    other_cuts: tuple[int, ...] = ()
    """Of every second sequence of a replica instead, where there are any."""
    slices: int = 1
    """Of samples: into how many the longest one is cut."""
    replica_sequences: int = 1
    """Sequences of a step on each data-parallel replica."""
    dp: int = 1
    pp: int = 1
    sp: int = 1
    sequence_parallel: str = "ulysses"
    schedule: str = "sppo"
    virtual: int = 1
    zero: int = 1
    bucket_bytes: int = 400
    policy: str = "retain"
    """Of `policy_placement`; of tensors that move, what happens to the rest: kept or recomputed."""
    ratio: float = 0.0
    """Of the bytes that a subsequence saves, what moves."""
    last_too: bool = False
    """Whether the last subsequence moves tensors, too."""
    input_every: int = 1
    tier: str = ""
    """host or disk, where tensors move."""
    kv_offloaded: tuple[int, ...] = ()
    """Stages whose K and V go there, too, between forward and backward."""
    kv_recomputed: tuple[int, ...] = ()
    """Stages that recompute theirs before their backward."""
    recomputes_windows: bool = False
    """Whether stages that retain K and V recompute those of layers with a window."""
    streams: tuple[str, ...] = ()
    """What lives in another tier, stage by stage on the device: weights, gradients; "frozen": of
    the weights only those that do not train."""
    queues: str = "threads"
    lag: int = 0
    """Packed tensors that compute may be ahead of the copies out."""
    evaluates: bool = False
    """Whether a sequence is evaluated before each step."""
    debug: bool = False
    """Whether memory that is used again is overwritten with NaN in between."""

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.sp

    @property
    def num_sequences(self) -> int:
        return self.dp * self.replica_sequences

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual

    @property
    def tiers(self) -> StateTiers:
        """Of the state; weights that train and gradients are where the optimizer is."""
        away = {*self.streams}
        return StateTiers(
            weights="host" if away & {"weights", "frozen"} else "device",
            gradients="host" if "gradients" in away else "device",
            optimizer="host" if away & {"weights", "gradients"} else "device",
        )

    def cuts_of(self, sequence: int) -> tuple[int, ...]:
        """Of one sequence of a replica."""
        return self.other_cuts if self.other_cuts and sequence % 2 else self.cuts

    def mesh_shape(self, model: ModelConfig) -> MeshShape:
        copies = None
        if self.sequence_parallel == "megatron" and self.sp > 1:
            copies = tensor_shard(model, degree=self.sp).repeats
        return MeshShape(self.dp, self.pp, self.sp, copies)


@dataclass(frozen=True, repr=False)
class Case(_Short):
    """A whole training."""

    seed: int = 0
    """Of weights, tokens, labels, documents, and of the order in which emulated ranks run."""
    dtype: str = "fp32"
    model: Shape = Shape()
    legs: tuple[Leg, ...] = (Leg(),)
    samples: Samples | None = None
    """What is trained on instead of sequences that are all cut alike."""
    documents: int = 1
    """Isolated documents of a sequence."""
    ignored: float = 0.1
    """Share of labels that do not count."""
    turn: int = 0
    """Tokens of a turn of a conversation, of which every second one does not count; 0: no turns."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    router_losses: tuple[float, float] = (0.0, 0.0)
    """Factors of the balance loss and of the z-loss of the routers."""
    clip_norm: float = 1.0
    weight_decay: float = 0.1
    trainable: Trainable = EVERYTHING
    """Adapters, and what trains."""

    @property
    def terms(self) -> LossTerms:
        return LossTerms(self.label_smoothing, self.z_loss)

    @property
    def routing(self) -> RoutingConfig:
        balance_loss, z_loss = self.router_losses
        return RoutingConfig(balance_loss=balance_loss, z_loss=z_loss)

    @property
    def choice_biases(self) -> dict[str, torch.Tensor]:
        """Random biases by which experts are chosen."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = choice_bias_shapes(self.model.config())
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=0.02, eps=1e-4, clip_norm=self.clip_norm, weight_decay=self.weight_decay
        )

    @property
    def num_ranks(self) -> int:
        """Most ranks of a leg."""
        return max(leg.num_ranks for leg in self.legs)

    def sequences(self, leg: int, step: int) -> list[SequenceData]:
        """The data of one step of one leg, for all replicas."""
        count = self.legs[leg].num_sequences
        return [self._sequence(leg, step, index) for index in range(count)]

    def _sequence(self, leg: int, step: int, index: int) -> SequenceData:
        key = ((self.seed * 7 + leg) * 31 + step) * 17 + index
        generator = torch.Generator().manual_seed(key)
        cuts = self.legs[leg].cuts_of(index % self.legs[leg].replica_sequences)
        length, words = cuts[-1], self.model.vocab_size
        tokens = torch.randint(0, words, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[torch.rand(length, generator=generator) < self.ignored] = IGNORED_LABEL
        if self.turn:
            labels[torch.arange(length) // self.turn % 2 == 0] = IGNORED_LABEL
        if index == 0:
            labels[length // 2] = tokens[length // 2 + 1]  # at least one of the step counts
        starts = torch.randperm(length, generator=generator)[: self.documents - 1].tolist()
        return SequenceData(tokens[:-1], labels, tuple(sorted({0, *starts})))
