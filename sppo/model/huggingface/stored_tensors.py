"""Tensors of Hugging Face files: their names, shapes, and the parameters that lie in them.

One table serves reading and writing (:mod:`.layouts`). A stored tensor is one or several SPPO
parameters stacked along the outputs, or the share of one expert in a parameter of all experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from sppo.config.huggingface.families import FAMILIES
from sppo.config.huggingface.model_config import hf_family
from sppo.config.huggingface.settings import field_of
from sppo.config.huggingface.tensor_names import EXPERT, TensorNames
from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, choice_bias_shapes, parameter_shapes

Entry = TypeVar("Entry")

_PREFIX = re.compile(
    r"^(?:model\.language_model|language_model\.model|model|transformer|language_model)\."
)
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|^h\.\d+\.attn\.(?:bias|masked_bias)$")
_LAYER = re.compile(r"^layers\.(\d+)\.")

HEAD = "lm_head.weight"
"""Name of the vocabulary projection, the only tensor that never has a prefix."""


class HfPart(NamedTuple):
    """Share of a stored tensor that one parameter, or one expert of a parameter, has."""

    name: str
    """SPPO's name of the parameter."""
    rows: slice = slice(None)
    """Outputs of each group of the tensor that belong to the parameter."""
    expert: int | None = None
    """Expert of the parameter whose tensor it is; None for the whole parameter."""
    head_rows: tuple[int, ...] = ()
    """Stored place of each output of a head; () if the order is the same."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a Hugging Face file."""

    name: str
    """Name without its prefix, such as ``model.``."""
    prefix: str
    """Prefix that transformers writes before the name."""
    shape: Shape
    """Shape as stored."""
    parts: tuple[HfPart, ...]
    """Parameters in the tensor."""
    transposed: bool = False
    """True if the last two dimensions are stored as ``[inputs, outputs]``."""
    stacked: bool = False
    """True if the first dimension counts experts, so that the outputs are in the second one."""
    depthwise: bool = False
    """True if a dimension of one lies between outputs and inputs."""
    groups: int = 1
    """Number of equal groups of outputs, each of which has its share of every parameter."""
    is_fp32: bool = False
    """True if the tensor is written in fp32 beside those of a shorter type."""

    @property
    def full_name(self) -> str:
        """Name of the tensor as transformers writes it."""
        return self.prefix + self.name


def names_of(model: ModelConfig) -> TensorNames:
    """Return the names and layouts of tensors in the files of a model's family."""
    return FAMILIES[hf_family(model)].tensors


def hf_tensors(model: ModelConfig, stored: Collection[str] = ()) -> tuple[HfTensor, ...]:
    """Return the tensors of a Hugging Face directory of ``model``, ordered as ``stored_shapes``.

    Args:
        model: Shape of the model.
        stored: Bare names in the directory, which say what layout it has; () for that of a new one.

    Raises:
        ValueError: No Hugging Face family computes exactly this model.
    """
    layouts = [_tensors_of_layout(model, names) for names in names_of(model).layouts]
    return max(layouts, key=lambda tensors: sum(tensor.name in stored for tensor in tensors))


def _tensors_of_layout(model: ModelConfig, names: TensorNames) -> tuple[HfTensor, ...]:
    """Return the tensors of a directory of one layout."""
    shapes = stored_shapes(model)
    groups: dict[str, list[str]] = {}
    tensors: dict[str, HfTensor] = {}
    for ours in shapes:
        stored = HEAD if ours == "head.weight" else names.stored(ours)
        groups.setdefault(stored, []).append(ours)
    for stored, parts in groups.items():
        if EXPERT in stored:
            found = _tensors_of_experts(stored, parts[0], shapes[parts[0]], prefix=names.prefix)
        else:
            found = [_tensor(stored, parts, shapes, model=model, names=names)]
        tensors |= {tensor.name: tensor for tensor in found}
    return tuple(tensors.values())


def stored_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all parameters, and of the biases by which experts are chosen."""
    return parameter_shapes(model) | choice_bias_shapes(model)


def head_rows(module: str, model: ModelConfig, names: TensorNames) -> tuple[int, ...]:
    """Return the stored place of each output of a head of a module; () if the order is the same."""
    if not names.adjacent_pairs or module not in ("q", "k"):
        return ()
    rotated = model.rotary_size
    return (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, model.head_dim))


def bare_name(stored: str) -> str:
    """Return ``stored`` without a prefix such as ``model.`` or ``model.language_model.``."""
    return _PREFIX.sub("", stored)


def without_other_parts(
    stored: Mapping[str, Entry], model: ModelConfig
) -> tuple[dict[str, Entry], dict[str, int]]:
    """Return stored tensors by bare name, and the number of those of each other part of a model.

    These are a vision tower, and layers behind the last one that predict further tokens.
    """
    names = names_of(model)
    own: dict[str, Entry] = {}
    others = Counter[str]()
    for name, tensor in stored.items():
        layer = _LAYER.match(name)
        if layer and names.has_later_layers and int(layer[1]) >= model.num_layers:
            others[layer[0][:-1]] += 1
        elif re.search(names.skipped, name):
            others[name.partition(".")[0]] += 1
        else:
            own[name] = tensor
    return own, others


def is_buffer(name: str) -> bool:
    """Return whether a bare name is a constant of older files: a mask or rotary frequencies."""
    return _BUFFERS.search(name) is not None


def _tensors_of_experts(stored: str, part: str, shape: Shape, *, prefix: str) -> list[HfTensor]:
    """Return the tensors of all experts, each of which has a share of one parameter."""
    return [
        HfTensor(
            stored.replace(EXPERT, str(expert)), prefix, shape[1:], (HfPart(part, expert=expert),)
        )
        for expert in range(shape[0])
    ]


def _tensor(
    stored: str,
    parts: list[str],
    shapes: dict[str, Shape],
    *,
    model: ModelConfig,
    names: TensorNames,
) -> HfTensor:
    """Return the tensor of one name, with all parameters in it."""
    module = parts[0].split(".")[-2]
    stacked = module.startswith("expert_")
    axis = 1 if stacked else 0
    groups = field_of(model, names.groups[module]) if module in names.groups else 1
    shape, found, end = [*shapes[parts[0]]], [], 0
    for part in sorted(parts, key=names.place):
        begin, end = end, end + shapes[part][axis] // groups
        order = head_rows(part.split(".")[-2], model, names)
        found.append(HfPart(part, rows=slice(begin, end), head_rows=order))
    shape[axis] = groups * end
    transposed = module in names.transposed and len(shape) - axis == 2
    if transposed:
        shape[-2:] = shape[:-3:-1]
    if module in names.depthwise:
        shape.insert(1, 1)
    return HfTensor(
        name=stored,
        prefix="" if stored == HEAD else names.prefix,
        shape=tuple(shape),
        parts=tuple(found),
        transposed=transposed,
        stacked=stacked,
        depthwise=module in names.depthwise,
        groups=groups,
        is_fp32=".".join(parts[0].split(".")[2:]) in names.fp32,
    )
