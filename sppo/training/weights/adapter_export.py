"""Adapters of runs for PEFT: the base they belong to, and whether PEFT's files can hold them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError

from sppo.checkpoint.checkpoint import model_tensors
from sppo.checkpoint.files import is_step_name
from sppo.checkpoint.newest import Checkpoint
from sppo.config import RunConfig
from sppo.config.adapter import AdapterConfig
from sppo.config.huggingface.model_config import model_fields, read_config
from sppo.config.model import NOT_COMPUTED, ModelConfig
from sppo.model.huggingface.digest import weights_digest
from sppo.model.huggingface.peft_format import peft_config
from sppo.model.huggingface.peft_weights import save_adapter
from sppo.model.huggingface.reading import open_hf_weights
from sppo.quoting import quoted
from sppo.training.weights.base_weights import run_of, start_of
from sppo.training.weights.starting_weights import checkpoint_weights

_log = logging.getLogger(__name__)

ADAPTER_DIRECTORY = "adapter"
"""Directory in a checkpoint with the adapter in the files of PEFT."""
_ROPE = ("rope_theta", "rope_scaling")


def base_of_adapter(
    run: RunConfig, start: Checkpoint | None, *, given: str | None = None
) -> str | None:
    """Return the published model that a run's adapter belongs to, checked for use by PEFT.

    Args:
        run: Configuration of a run with an adapter.
        start: Checkpoint of another run that it started from, if it did.
        given: Directory with a copy of the base; None for the base itself.

    Returns:
        Directory of the model; None for random weights, or those that another run has trained.

    Raises:
        ValueError: PEFT's files cannot hold the adapter; or the run does not compute what the base
            does, as with another ``rope_scaling``, which is not part of an adapter.
        OSError: The base cannot be read.
    """
    assert run.adapter is not None, "the run has an adapter"
    peft_config(run.model, run.adapter, base=None)
    name, base = _base(run, start) if given is None else (given, _published(given))
    if name is not None:
        _check_same_function(run.model, base, name=name)
    is_trained = name is not None and is_step_name(Path(name).name)
    return None if is_trained else name


def check_is_base(directory: Path, checkpoint: Checkpoint) -> None:
    """Raise ValueError unless a directory holds the weights beside which an adapter was trained.

    Published weights are compared by their digest. Those of another run are compared one by one
    with that run's checkpoint, rounded as the directory has them.
    """
    while (start := start_of(checkpoint)) is not None and run_of(start).adapter is not None:
        checkpoint = start
    kept, model = checkpoint.metadata["base"], run_of(checkpoint).model
    if start is None:
        is_base = weights_digest(directory, model) == kept["digest"]
    else:
        base = checkpoint_weights(start)
        copied = open_hf_weights(directory, model).items()
        is_base = all(torch.equal(own, base[name].to(own.dtype)) for name, own in copied)
    if not is_base:
        raise ValueError(
            f"{directory} holds other weights than {kept['name']}, beside which the adapter was "
            "trained: give a copy of those"
            + ("" if start is None else ", which sppo convert to-hf writes")
        )


def adapter_export(run: RunConfig, start: Checkpoint | None) -> Callable[[Path], None] | None:
    """Return a function that adds the adapter to a checkpoint directory, in the files of PEFT.

    None without an adapter, if the run asks for none, or if PEFT's files cannot hold it, which a
    line of the log says.

    Args:
        run: Validated run configuration.
        start: Checkpoint of another run that it started from, if it did.
    """
    if run.adapter is None or run.checkpoint.export == "none":
        return None
    try:
        base = base_of_adapter(run, start)
    except (OSError, ValueError) as error:
        _log.info("checkpoints hold no adapter/ for PEFT: %s", error)
        return None
    return partial(_export, model=run.model, adapter=run.adapter, base=base)


def _export(
    directory: Path, *, model: ModelConfig, adapter: AdapterConfig, base: str | None
) -> None:
    weights = model_tensors(directory)
    save_adapter(directory / ADAPTER_DIRECTORY, weights, model, adapter, base=base)


def _base(run: RunConfig, start: Checkpoint | None) -> tuple[str | None, ModelConfig]:
    """Return path and model of the base of a run; the path is None for random weights."""
    if start is not None:
        theirs = run_of(start)
        goes_on = theirs.adapter is not None
        return _base(theirs, start_of(start)) if goes_on else (str(start.path), theirs.model)
    if run.model.from_hf is None:
        return None, run.model
    return run.model.from_hf, _published(run.model.from_hf)


def _published(directory: str) -> ModelConfig:
    """Return the model that config.json in a directory describes."""
    try:
        return ModelConfig.model_validate(model_fields(read_config(Path(directory))))
    except ValidationError:
        raise ValueError(f"{directory}: its config.json is not that of a model") from None


def _check_same_function(model: ModelConfig, base: ModelConfig, *, name: str) -> None:
    """Raise ValueError if a model computes something else than its base, adapters aside."""
    ours, theirs = model.model_dump(mode="json"), base.model_dump(mode="json")
    compared = ours.keys() - {*NOT_COMPUTED, "max_positions"}
    different = [key for key in ours if key in compared and ours[key] != theirs[key]]
    if not different:
        return
    found = "; ".join(
        f"model.{key} is {quoted(ours[key])}, {quoted(theirs[key])} in {name}" for key in different
    )
    hint = "merge with sppo convert to-hf"
    if set(different) <= set(_ROPE):
        hint += (
            ", or write the base with it, sppo convert from-hf SRC BASE --rope-scaling-of RUN, and "
            "name that one: sppo convert to-peft RUN DST --base BASE"
        )
    raise ValueError(f"an adapter cannot carry {', '.join(different)} ({found}): {hint}")
