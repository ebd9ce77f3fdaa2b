"""Names and layouts of a model's tensors in Hugging Face files.

One table serves reading and writing: a stored tensor is one or several SPPO parameters, stacked
along the outputs, and transposed where GPT-2 stores ``[inputs, outputs]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, parameter_shapes

_ROTARY_MODULES = {
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
_GPT2_MODULES = {
    "embed": "wte",
    "positions": "wpe",
    "attention_norm": "ln_1",
    "q": "attn.c_attn",
    "k": "attn.c_attn",
    "v": "attn.c_attn",
    "o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "final_norm": "ln_f",
}
_TRANSPOSED = ("q", "k", "v", "o", "up", "down")

_PREFIX = re.compile(r"^(?:model|transformer)\.")
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|^h\.\d+\.attn\.(?:bias|masked_bias)$")

HEAD = "lm_head.weight"
"""Name of the vocabulary projection, the only tensor that never has a prefix."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a Hugging Face file.

    Attributes:
        name: Name without the ``model.`` or ``transformer.`` prefix.
        prefix: Prefix that transformers writes before the name.
        shape: Shape as stored.
        parts: SPPO's names of the parameters in the tensor, in their order along the outputs.
        rows: Number of outputs of each part.
        transposed: Whether the tensor is stored as ``[inputs, outputs]``.
    """

    name: str
    prefix: str
    shape: Shape
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool

    @property
    def full_name(self) -> str:
        """Name of the tensor as transformers writes it."""
        return self.prefix + self.name


def hf_tensors(model: ModelConfig) -> tuple[HfTensor, ...]:
    """Return the tensors of a Hugging Face directory of ``model``, ordered as ``parameter_shapes``.

    Raises:
        ValueError: A parameter for which no Hugging Face family has a name.
    """
    shapes = parameter_shapes(model)
    gpt2 = model.position == "learned"
    groups: dict[str, list[str]] = {}
    for ours in shapes:
        groups.setdefault(_hf_name(ours, gpt2=gpt2), []).append(ours)
    return tuple(_tensor(name, parts, shapes, gpt2=gpt2) for name, parts in groups.items())


def bare_name(stored: str) -> str:
    """Return ``stored`` without its ``model.`` or ``transformer.`` prefix, if present."""
    return _PREFIX.sub("", stored)


def is_buffer(name: str) -> bool:
    """Return whether a bare name is a constant of older files: a mask or rotary frequencies."""
    return _BUFFERS.search(name) is not None


def _hf_name(ours: str, *, gpt2: bool) -> str:
    if ours == "head.weight":
        return HEAD
    modules = _GPT2_MODULES if gpt2 else _ROTARY_MODULES
    *layer, module, leaf = ours.split(".")
    if module not in modules:
        kind = "learned" if gpt2 else "rotary"
        raise ValueError(f"no Hugging Face family with {kind} positions has a tensor for {ours}")
    stem = [] if not layer else ["h" if gpt2 else "layers", layer[1]]
    return ".".join([*stem, modules[module], leaf])


def _tensor(name: str, parts: list[str], shapes: dict[str, Shape], *, gpt2: bool) -> HfTensor:
    rows = tuple(shapes[part][0] for part in parts)
    shape = (sum(rows), *shapes[parts[0]][1:])
    module = parts[0].split(".")[-2]
    transposed = gpt2 and module in _TRANSPOSED and len(shape) == 2
    prefix = "" if name == HEAD else "transformer." if gpt2 else "model."
    return HfTensor(
        name=name,
        prefix=prefix,
        shape=shape[::-1] if transposed else shape,
        parts=tuple(parts),
        rows=rows,
        transposed=transposed,
    )
