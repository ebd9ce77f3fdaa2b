"""Names and layouts of the tensors of a family's files, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ROTARY_MODULES = {
    "embed": "embed_tokens",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "final_norm": "norm",
}
"""Modules of Llama and of most families."""

EXPERT = "{expert}"
"""Number of an expert in the name of a module: each expert has a tensor of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of stored tensors, and how parameters lie in them.

    Several parameters under one name are stacked along their outputs, in the order of `modules`.
    """

    modules: Mapping[str, str]
    """Names of modules, or of whole parameters such as ``sinks.weight``, by SPPO's names."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Names of modules in files of another layout, which is read and not written."""
    prefix: str = "model."
    """Beginning of all names but that of the vocabulary projection."""
    layers: str = "layers"
    """Name of the list of layers."""
    transposed: frozenset[str] = frozenset()
    """SPPO's modules whose matrices are stored as ``[inputs, outputs]``."""
    depthwise: frozenset[str] = frozenset()
    """SPPO's modules whose matrices are stored as ``[outputs, 1, inputs]``, as convolutions are."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Model fields that count groups, by SPPO's modules: their tensor has, group after group, the
    share of each parameter. The tensor of a module that is not named has one group."""
    adjacent_pairs: bool = False
    """True if q and k are rotated in pairs of adjacent dimensions; SPPO rotates dimension i with
    i + R/2, so that the outputs of their projections have another order."""
    fp32: frozenset[str] = frozenset()
    """SPPO's parameters within a layer that are stored in fp32 beside those of a shorter type."""
    skipped: str = "$^"
    """Regular expression of bare names that other parts of a model have, such as a vision tower."""
    has_later_layers: bool = False
    """True if files may hold further layers behind the last one, which predict more tokens and are
    skipped."""

    @property
    def shares_last_words(self) -> bool:
        """True if modules of different tensors have the same last word, as in GPT-2's c_proj."""
        modules = set(self.modules.values())
        return len({module.rpartition(".")[2] for module in modules}) < len(modules)

    @property
    def layouts(self) -> tuple[TensorNames, ...]:
        """Names in files of each layout; the first one is written."""
        if not self.others:
            return (self,)
        same = {k: v for k, v in self.modules.items() if k.partition(".")[0] not in self.others}
        return self, replace(self, modules={**same, **self.others}, others={})

    def stored(self, parameter: str) -> str:
        """Return the bare name of the tensor that holds a parameter."""
        *stem, module, leaf = parameter.split(".")
        name = self.modules.get(f"{module}.{leaf}", f"{self.modules.get(module)}.{leaf}")
        return ".".join([self.layers, stem[1], name] if stem else [name])

    def place(self, parameter: str) -> int:
        """Return a number that is larger for parameters that lie later in the same tensor."""
        module, leaf = parameter.split(".")[-2:]
        places = {name: place for place, name in enumerate(self.modules)}
        return places.get(f"{module}.{leaf}", places.get(module, 0))
