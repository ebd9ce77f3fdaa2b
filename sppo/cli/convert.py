"""``sppo convert``: conversion of weights from and to Hugging Face directories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from sppo.checkpoint.newest import check_any
from sppo.cli.arguments import Json
from sppo.cli.command_group import CommandGroup
from sppo.cli.exit_codes import exit_codes
from sppo.cli.export_extras import chosen_extras, new_end, provenance_readme, run_extras
from sppo.cli.printing import Screen, Unbroken, emit
from sppo.config.huggingface.families import FAMILIES
from sppo.config.huggingface.model_config import (
    hf_family,
    ignored_settings,
    model_fields,
    read_config,
)
from sppo.config.model import ModelConfig
from sppo.config.problems import ConfigError, problems_of
from sppo.config.start_model import CONTEXT_KEYS, model_of_start
from sppo.cost.trainable import trainable_of_sections
from sppo.model.huggingface.extras import BESIDE_ADAPTER, GENERATION_FILE, Extras, read_extras
from sppo.model.huggingface.files import check_headers
from sppo.output_file import check_unused_directory
from sppo.units import counted, format_bytes, format_count, parse_size

if TYPE_CHECKING:
    from sppo.model.huggingface.writing import SavedWeights

app = CommandGroup(help="Convert weights from and to Hugging Face.")


class StoredType(StrEnum):
    """Type of stored weights."""

    KEEP = "keep"
    FP32 = "fp32"
    BF16 = "bf16"


Dtype = Annotated[StoredType, typer.Option(help="Type of the written weights.")]
ShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest weight file, e.g. 500MiB or 5GiB.")
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="New directory.")]
RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A run's output directory, or one checkpoint in it."),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        help="Take the tokenizer and what belongs to it from DIR."
        " [default: that of the run's tokens, and of its model.from_hf]",
        show_default=False,
    ),
]
_UNPUBLISHED = "the weights that the run started from, which are in no directory of a model"


@app.command("from-hf")
def from_hf(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Hugging Face directory of a model of one of the known families."
        ),
    ],
    destination: Destination,
    dtype: Dtype = StoredType.KEEP,
    max_shard_size: ShardSize = "5GiB",
    rope_scaling_of: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Write config.json with the rotary positions of a run, for its adapter."
            " [default: those of SRC]",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Check a published model tensor by tensor and write a copy in the same standard layout.

    Use DST in a run file as model: {from_hf: DST}. SRC can be used directly, too: a run checks it
    the same way. If SRC mixes types, DST has the narrowest type that holds all of them exactly.

        sppo convert from-hf downloads/Qwen3-0.6B models/qwen3-0.6b
        sppo convert from-hf models/qwen3-0.6b models/stretched --rope-scaling-of runs/lora
    """
    with exit_codes():
        check_unused_directory(destination)
        max_shard_bytes = parse_size(max_shard_size)
        config = read_config(source)
        fields = model_fields(config)
        if rope_scaling_of is not None:
            theirs = model_of_start(str(rope_scaling_of), output=None)
            fields |= {key: theirs[key] for key in CONTEXT_KEYS}
        model = _model(fields, source=source)
        skipped = check_headers(source, model).skipped
        from sppo.model.huggingface.reading import open_hf_weights
        from sppo.model.huggingface.writing import DTYPES

        weights = open_hf_weights(source, model)
        kind = dtype.value
        if dtype is StoredType.KEEP:
            kind = next(name for name, known in DTYPES.items() if known == weights.dtype)
        values = _write(destination, weights, model, kind, max_shard_bytes, read_extras(source))
    values |= {"source": str(source), "ignored": list(ignored_settings(config))}
    values["skipped"] = dict(skipped)
    emit(lambda: values, lambda: _screen(values), as_json=json_output)


@app.command("to-hf")
def to_hf(
    source: RunOrCheckpoint,
    destination: Destination,
    dtype: Dtype = StoredType.KEEP,
    max_shard_size: ShardSize = "5GiB",
    tokenizer: TokenizerOption = None,
    json_output: Json = False,
) -> None:
    """Write the trained weights of a run as a model that transformers and similar programs load.

    An adapter is merged: its change of a weight is added in fp32, and the sum is rounded once. The
    stored type is train.dtype of the run unless --dtype names another. Tokenizer and chat
    template are those that the run's tokens were prepared with; what else programs need to generate
    text, such as generation_config.json, comes from the model that the run started from. What is
    missing is said, and whether the template differs from that model's.

        sppo convert to-hf runs/long models/long
        sppo convert to-hf runs/quickstart models/quickstart --tokenizer downloads/Qwen3-0.6B
    """
    with exit_codes():
        check_unused_directory(destination)
        max_shard_bytes = parse_size(max_shard_size)
        chosen = None if tokenizer is None else chosen_extras(tokenizer)
        check_any(source)
        from sppo.checkpoint.checkpoint import read_weights
        from sppo.model.huggingface.merged_weights import MergedWeights
        from sppo.model.huggingface.writing import DTYPES
        from sppo.training.weights.base_weights import checked_start
        from sppo.training.weights.starting_weights import checkpoint_weights

        checkpoint, saved = read_weights(source)
        metadata = checkpoint.metadata
        fields, trained_as = _trained(metadata, source=source)
        kind = trained_as if dtype is StoredType.KEEP else dtype.value
        checked_start(checkpoint)
        model = _model(fields, source=source)
        weights = MergedWeights(
            checkpoint_weights(checkpoint, saved),
            trainable_of_sections(metadata["config"] | {"model": fields}).adapter,
            rounded_to=DTYPES[kind],
        )
        extras, told = run_extras(metadata, chosen)
        readme = provenance_readme(metadata, source=source)
        values = _write(destination, weights, model, kind, max_shard_bytes, extras, readme=readme)
    values |= {"source": str(source), "step": metadata.get("step"), **told}
    values["lost_change"] = weights.lost._asdict() if weights.lost.name else None
    emit(lambda: values, lambda: _screen(values), as_json=json_output)
    if extras.endless:
        typer.echo(
            f"warning: {extras.endless} has no eos_token_id, so programs that load this model "
            "never stop generating; --tokenizer DIR takes it from another model",
            err=True,
        )


@app.command("to-peft")
def to_peft(
    source: RunOrCheckpoint,
    destination: Destination,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Copy of the model beside the adapter that programs will load with it."
            " [default: the run's model.from_hf]",
            show_default=False,
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    json_output: Json = False,
) -> None:
    """Write the adapter of a run as PEFT does, for vLLM, transformers and similar programs.

    All tensors are written in fp32 and read back. Tokenizer and chat template are added as by
    to-hf. adapter.from_peft in a run file reads such a directory.

        sppo convert to-peft runs/lora adapters/lora
    """
    with exit_codes():
        check_unused_directory(destination)
        chosen = None if tokenizer is None else chosen_extras(tokenizer)
        check_any(source)
        from sppo.checkpoint.checkpoint import read_weights
        from sppo.model.huggingface.peft_weights import save_adapter
        from sppo.training.weights.adapter_export import base_of_adapter, check_is_base
        from sppo.training.weights.base_weights import checked_start, run_of, start_of

        checkpoint, weights = read_weights(source)
        metadata = checkpoint.metadata
        if metadata.get("config", {}).get("adapter") is None:
            raise ValueError(
                f"{source} was trained without an adapter: sppo convert to-hf writes its weights"
            )
        run = run_of(checkpoint)
        assert run.adapter is not None, "checked above"
        if base is None:
            start = checked_start(checkpoint)
        else:
            start = start_of(checkpoint)
            check_is_base(base, checkpoint)
        name = base_of_adapter(run, start, given=None if base is None else str(base))
        extras, told = run_extras(metadata, chosen)
        files = {n: content for n, content in extras.files.items() if n != GENERATION_FILE}
        saved = save_adapter(
            destination,
            weights,
            run.model,
            run.adapter,
            base=name,
            extra_files=files,
            readme=provenance_readme(metadata, source=source),
        )
    values = _written(destination, f"adapter of rank {run.adapter.rank}", "fp32", saved, files)
    told["missing"] = {n: why for n, why in told["missing"].items() if n in BESIDE_ADAPTER}
    values |= {"source": str(source), "step": metadata.get("step"), "base": name, **told}
    emit(lambda: values, lambda: _screen(values), as_json=json_output)
    if name and (end := new_end(extras, base=name)):
        typer.echo(
            f"warning: texts trained on end with eos_token_id {end}, those of {name} do not: "
            "programs must be told it, or never stop generating",
            err=True,
        )


def _write(
    destination: Path,
    weights: Mapping[str, Any],
    model: ModelConfig,
    dtype: str,
    max_shard_bytes: int,
    extras: Extras,
    *,
    readme: str = "",
) -> dict[str, Any]:
    """Write weights as a Hugging Face directory; return what was written as JSON values."""
    from sppo.model.huggingface.writing import save_hf_weights

    saved = save_hf_weights(
        destination,
        weights,
        model,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        token_ids=extras.token_ids,
        extra_files=extras.files,
        readme=readme,
    )
    family = hf_family(model)
    values = _written(destination, family, dtype, saved, extras.files)
    return values | {"no_layers": list(FAMILIES[family].no_layers)}


def _written(
    destination: Path, family: str, dtype: str, saved: SavedWeights, copied: Iterable[str]
) -> dict[str, Any]:
    """Return what was written as JSON values."""
    return {
        "destination": str(destination),
        "family": family,
        "dtype": dtype,
        "num_parameters": saved.num_parameters,
        "total_bytes": saved.total_bytes,
        "files": list(saved.files),
        "copied": list(copied),
    }


def _model(fields: dict[str, Any], *, source: Path) -> ModelConfig:
    """Return the validated model configuration of `fields`.

    Raises:
        ConfigError: Fields are out of range; the error lists all of them.
    """
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(str(source), problems_of(error, "model")) from None


def _trained(metadata: dict[str, Any], *, source: Path) -> tuple[dict[str, Any], str]:
    """Return the model fields and train.dtype of the run that wrote a checkpoint.

    max_positions is raised to the sequence length of the run if it is below it, because programs
    that load the model cut their input there.
    """
    try:
        config = metadata["config"]
        fields = dict(config["model"])
        if fields.get("position") == "rotary" and fields.get("max_positions") is not None:
            trained_on = int(config.get("sequence", {}).get("length", 0))
            fields["max_positions"] = max(fields["max_positions"], trained_on)
        return fields, str(config["train"]["dtype"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{source} does not say which run wrote it; is it a checkpoint?") from None


def _screen(values: dict[str, Any]) -> Screen:
    """Yield what was written, taken along, missing and ignored."""
    step = f" after step {values['step']}" if values.get("step") is not None else ""
    yield Unbroken(
        f"{values['destination']}: {values['family']}{step}, "
        f"{format_count(values['num_parameters'])} parameters in {values['dtype']}, "
        f"{format_bytes(values['total_bytes'])} in {counted(len(values['files']), 'file')}"
    )
    if values.get("lost_change"):
        name, share = values["lost_change"].values()
        yield Unbroken(f"merged: rounding loses at most {share:.2g} of a weight's change ({name})")
    if "base" in values:
        yield Unbroken(f"base: {values['base'] or _UNPUBLISHED}")
    if values["copied"]:
        yield f"copied: {', '.join(values['copied'])}"
    if values.get("chat_template"):
        yield f"chat template: {values['chat_template']}"
    missing = values.get("missing", {})
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, own in missing.items() if own == reason)
        yield Unbroken(f"missing: {names} ({reason})")
    for key in values.get("no_layers", ()):
        yield f"{key}: 0, no layers that predict further tokens"
    if values.get("skipped"):
        parts = (f"{counted(n, 'tensor')} of {part}" for part, n in values["skipped"].items())
        yield f"left out: {', '.join(parts)}"
    if values.get("ignored"):
        yield f"not applied in training: {', '.join(values['ignored'])}"
