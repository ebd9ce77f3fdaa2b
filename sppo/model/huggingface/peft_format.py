"""Adapters in the files of PEFT: names of tensors, and adapter_config.json. Imports no torch.

An adapter is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``. The file
holds the factors, as ``base_model.model.<module>.lora_A.weight``, and the whole tensors that train
beside them, as ``base_model.model.<name>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sppo.config.adapter import TARGETS, AdapterConfig
from sppo.config.huggingface.tensor_names import EXPERT
from sppo.config.json_file import read_json
from sppo.config.model import ModelConfig
from sppo.cost.trainable import LORA_A, LORA_B, Trainable, is_factor, trainable_of
from sppo.model.huggingface.files import StoredTensor, file_headers, tensor_faults
from sppo.model.huggingface.stored_tensors import (
    HEAD,
    HfPart,
    HfTensor,
    head_rows,
    hf_tensors,
    names_of,
)
from sppo.quoting import quoted

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_PICKLE = "adapter_model.bin"
_FACTORS = {LORA_A: "lora_A", LORA_B: "lora_B"}
_KINDS = {"norm": "norms", "embed": "embed", "head": "head"}
_USUAL = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
"""Settings that must have these values, or be absent."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base as they are."""
_READ_OR_HARMLESS = frozenset(
    {
        *_USUAL,
        *("r", "lora_alpha", "use_rslora", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "ensure_weight_tying", "fan_in_fan_out"),
        *("base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
        *("inference_mode", "lora_dropout", "runtime_config", "qalora_group_size"),
        *("megatron_config", "megatron_core", "eva_config", "corda_config", "lora_ga_config"),
        "velora_config",
    }
)
"""Settings that are read, or that do not change what an adapter computes; any other one must be
absent, null, false or empty. The names of the tensors say which modules have adapters."""


def peft_tensors(model: ModelConfig, trainable: Trainable) -> tuple[HfTensor, ...]:
    """Return the tensors of an adapter file.

    PEFT trains copies of whole tensors, so that a tied embedding is stored as both of its uses.

    Raises:
        ValueError: A projection that is part of a fused tensor, as q, k and v of GPT-2 are, or has
            a name that PEFT takes for that of experts.
    """
    stored = {part.name: tensor for tensor in hf_tensors(model) for part in tensor.parts}
    names, unnamed, found = names_of(model), _unnamed(model), []
    for name, shape in trainable.trained_shapes(model).items():
        module, _, leaf = name.rpartition(".")
        base = stored[f"{module}.weight" if is_factor(name) else name]
        if not is_factor(name):
            found.append(_tensor(base.full_name, HfPart(name), shape))
            continue
        target = module.rpartition(".")[2]
        if target in unnamed:
            raise ValueError(
                f"PEFT's files have no adapters of {target}: {unnamed[target]}; leave them out of "
                "adapter.targets, or merge with sppo convert to-hf"
            )
        order = head_rows(target, model, names) if leaf == LORA_B else ()
        stem = base.full_name.removesuffix("weight")
        part = HfPart(name, head_rows=order)
        found.append(_tensor(f"{stem}{_FACTORS[leaf]}.weight", part, shape))
    if model.tie_embeddings and trainable.trains("embed.weight"):
        shape = trainable.trained_shapes(model)["embed.weight"]
        found.append(_tensor(HEAD, HfPart("embed.weight"), shape))
    return tuple(found)


def _unnamed(model: ModelConfig) -> dict[str, str]:
    """Return the reasons why PEFT's files cannot hold adapters of some projections."""
    found, modules = {}, names_of(model).modules
    names = [*modules.values(), *names_of(model).others.values()]
    experts = {name.rpartition(".")[2] for name in names if EXPERT in name}
    for target, name in modules.items():
        word = name.rpartition(".")[2]
        parts = [other for other, theirs in modules.items() if theirs == name]
        if len(parts) > 1:
            found[target] = f"the model stores {', '.join(parts)} as one tensor, {word}"
        elif word in experts:
            found[target] = f"PEFT takes {word} for projections of experts"
    return found


def _tensor(name: str, part: HfPart, shape: tuple[int, ...]) -> HfTensor:
    return HfTensor(name, _PREFIX, shape, (part,))


def peft_config(model: ModelConfig, adapter: AdapterConfig, *, base: str | None) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Args:
        model: Model with the adapter.
        adapter: The adapter.
        base: Directory of the weights beside the adapter; None if they have none.

    Raises:
        ValueError: PEFT's files cannot hold the adapter.
    """
    names = names_of(model)
    words_of_target = 2 if names.shares_last_words else 1
    targets, whole = set(), set()
    for tensor in peft_tensors(model, trainable_of(adapter, None, model=model)):
        words = tensor.name.split(".")
        if is_factor(tensor.parts[0].name):
            targets.add(".".join(words[:-2][-words_of_target:]))
        else:
            whole.add(words[-2])
    alpha = adapter.rank if adapter.alpha is None else adapter.alpha
    return {
        **_USUAL,
        "base_model_name_or_path": base,
        "fan_in_fan_out": not names.transposed.isdisjoint(TARGETS),
        "inference_mode": True,
        "layers_to_transform": None if adapter.layers is None else list(adapter.layers),
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": sorted(whole) or None,
        "r": adapter.rank,
        "target_modules": sorted(targets),
        "use_rslora": adapter.scaling == "rank_stabilized",
    }


def check_adapter(
    directory: Path, model: ModelConfig, adapter: AdapterConfig
) -> dict[str, StoredTensor]:
    """Check that a directory holds an adapter as a run describes it; return its tensors by name.

    Settings and the headers of tensors are read, no values.

    Args:
        directory: Directory that PEFT, or ``sppo convert to-peft``, has written.
        model: Model of the run.
        adapter: Section ``adapter`` of the run.

    Raises:
        ValueError: Files are missing or damaged, the adapter computes something else than plain
            LoRA does, or it has another rank, scale, targets, layers or tensors.
        OSError: A file cannot be read.
    """
    config = _read_config(directory)
    _check_kind(directory / CONFIG_FILE, config)
    expected = peft_tensors(model, trainable_of(adapter, None, model=model))
    stored = _stored(directory)
    # Tensors decide which modules have adapters: target_modules may be any pattern of names.
    differences = [*_other_scale(config, adapter), *_other_modules(stored, model, adapter)]
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise ValueError(f"{directory} is another adapter than that of the run file:\n{lines}")
    faults = tensor_faults(stored, {tensor.name: tensor for tensor in expected})
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ValueError(f"{directory} does not hold the adapter of this run:\n{lines}")
    return stored


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no {CONFIG_FILE}: give a directory that PEFT's save_pretrained or "
            "sppo convert to-peft has written"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {quoted(config)}, not a mapping of settings")
    return config


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError unless the settings are those of plain LoRA."""
    unusual = [
        key
        for key, value in config.items()
        if value
        and (key not in _READ_OR_HARMLESS or (key in _USUAL and value != _USUAL[key]))
        or (key == "init_lora_weights" and value not in _PLAIN_STARTS)
    ]
    if unusual:
        shown = ", ".join(f"{key}={quoted(config[key])}" for key in unusual)
        raise ValueError(
            f"{path} has {shown}: only plain LoRA of a causal language model can be continued; "
            "merge the adapter into its base with PEFT, and start from that as model.from_hf"
        )


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an adapter by name, without the prefix that PEFT writes."""
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        reason = f"{directory} holds no {WEIGHTS_FILE}"
        if (directory / _PICKLE).is_file():
            reason += f"; {_PICKLE} is a pickle, which can run code: save it as safetensors first"
        raise ValueError(reason)
    found = {tensor.key.removeprefix(_PREFIX): tensor for tensor in file_headers(path)}
    if not found:
        raise ValueError(f"{path} holds no tensor; save the adapter again, from gathered weights")
    return found


def _other_scale(config: Mapping[str, Any], adapter: AdapterConfig) -> Iterator[str]:
    """Yield how rank and scale differ from those of a run."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        yield f"r is {quoted(rank)} there, not a whole number above 0"
        return
    if rank != adapter.rank:
        yield f"adapter.rank is {adapter.rank}, r is {rank} there: write adapter.rank={rank}"
        return
    scaling = "rank_stabilized" if config.get("use_rslora") else "standard"
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0:
        yield f"lora_alpha is {quoted(alpha)} there, not a number above 0"
        return
    theirs = adapter.model_copy(update={"alpha": float(alpha), "scaling": scaling})
    if not math.isclose(theirs.scale, adapter.scale, rel_tol=1e-12):
        yield (
            f"the scale is {adapter.scale:g}, {theirs.scale:g} there: write "
            f"adapter.alpha={alpha:g} adapter.scaling={scaling}"
        )


def _other_modules(
    stored: Iterable[str], model: ModelConfig, adapter: AdapterConfig
) -> Iterator[str]:
    """Yield how targets, layers and whole tensors differ from those of a run."""
    shown = {
        tensor.parts[0].name for tensor in _possible_tensors(model) if tensor.name in set(stored)
    }
    trained = trainable_of(adapter, None, model=model).trained_shapes(model)
    theirs, ours = _modules(shown), _modules(trained)
    for key, there in theirs.items():
        if there != ours[key]:
            value = ",".join(map(str, there))
            yield (
                f"adapter.{key} is [{', '.join(map(str, ours[key]))}], "
                f"[{', '.join(map(str, there))}] there"
                + (f": write adapter.{key}=[{value}]" if there or key == "also_train" else "")
            )


def _possible_tensors(model: ModelConfig) -> tuple[HfTensor, ...]:
    """Return the tensors of an adapter of everything that PEFT's files can hold."""
    targets = tuple(target for target in TARGETS if target not in _unnamed(model))
    every = AdapterConfig(rank=1, targets=targets, also_train=tuple(_KINDS.values()))
    return peft_tensors(model, trainable_of(every, None, model=model))


def _modules(names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the targets, layers and kinds of whole tensors of trained parameters."""
    factors = [name.split(".") for name in names if is_factor(name)]
    whole = [name.split(".")[-2] for name in names if not is_factor(name)]
    targets = {words[2] for words in factors}
    kinds = {kind for word, kind in _KINDS.items() if any(w.endswith(word) for w in whole)}
    return {
        "targets": [target for target in TARGETS if target in targets],
        "layers": sorted({int(words[1]) for words in factors}),
        "also_train": [kind for kind in _KINDS.values() if kind in kinds],
    }
