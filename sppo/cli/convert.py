"""``sppo convert``: conversion of weights from and to Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from sppo.checkpoint.newest import check_any
from sppo.cli.arguments import Json
from sppo.cli.command_group import CommandGroup
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, Unbroken, emit
from sppo.config.huggingface.model_config import (
    hf_config,
    ignored_settings,
    model_fields,
    read_config,
)
from sppo.config.model import ModelConfig
from sppo.config.problems import ConfigError, problems_of
from sppo.data.trained_tokenizer import template_change, trained_tokenizer, with_trained
from sppo.model.hf_extras import Extras, read_extras
from sppo.model.hf_files import check_headers
from sppo.output_file import check_unused_directory
from sppo.units import counted, format_bytes, format_count, parse_size
from sppo.version import __version__

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


@app.command("from-hf")
def from_hf(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Hugging Face directory: Llama, Qwen2, Qwen3, Mistral or GPT-2."
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New directory.")],
    dtype: Dtype = StoredType.KEEP,
    max_shard_size: ShardSize = "5GiB",
    json_output: Json = False,
) -> None:
    """Check a published model tensor by tensor and write a copy in the same standard layout.

    Use DST in a run file as model: {from_hf: DST}. SRC can be used directly, too: a run checks it
    the same way. If SRC mixes types, DST has the narrowest type that holds all of them exactly.

        sppo convert from-hf downloads/Qwen3-0.6B models/qwen3-0.6b
    """
    with exit_codes():
        check_unused_directory(destination)
        max_shard_bytes = parse_size(max_shard_size)
        config = read_config(source)
        model = _model(model_fields(config), source=source)
        check_headers(source, model)
        from sppo.model.hf_reading import open_hf_weights
        from sppo.model.hf_writing import DTYPES

        weights = open_hf_weights(source, model)
        kind = dtype.value
        if dtype is StoredType.KEEP:
            kind = next(name for name, known in DTYPES.items() if known == weights.dtype)
        values = _write(destination, weights, model, kind, max_shard_bytes, read_extras(source))
    values |= {"source": str(source), "ignored": list(ignored_settings(config))}
    emit(lambda: values, lambda: _screen(values), as_json=json_output)


@app.command("to-hf")
def to_hf(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A run's output directory, or one checkpoint in it."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New directory.")],
    dtype: Dtype = StoredType.KEEP,
    max_shard_size: ShardSize = "5GiB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Take the tokenizer and what belongs to it from DIR."
            " [default: that of the run's tokens, and of its model.from_hf]",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Write the trained weights of a run as a model that transformers and similar programs load.

    The stored type is train.dtype of the run unless --dtype names another. Tokenizer and chat
    template are those that the run's tokens were prepared with; what else programs need to generate
    text, such as generation_config.json, comes from the model that the run started from. What is
    missing is said, and whether the template differs from that model's.

        sppo convert to-hf runs/long models/long
        sppo convert to-hf runs/quickstart models/quickstart --tokenizer downloads/Qwen3-0.6B
    """
    with exit_codes():
        check_unused_directory(destination)
        max_shard_bytes = parse_size(max_shard_size)
        chosen = None if tokenizer is None else _chosen_extras(tokenizer)
        check_any(source)
        from sppo.checkpoint.checkpoint import read_weights

        checkpoint, weights = read_weights(source)
        metadata = checkpoint.metadata
        fields, trained_as = _trained(metadata, source=source)
        extras, reason = chosen or _run_extras(fields.get("from_hf"))
        template = None
        directories = [] if chosen else _token_directories(metadata)
        if trained := trained_tokenizer(directories):
            template = template_change(extras, trained)
            extras = with_trained(extras, trained)
        elif gone := next((path for path in directories if not path.exists()), None):
            template = f"that of the base, if it has one: {gone}, the run's tokens, is not there"
        model = _model(fields, source=source)
        kind = trained_as if dtype is StoredType.KEEP else dtype.value
        readme = _provenance(metadata, source=source)
        values = _write(destination, weights, model, kind, max_shard_bytes, extras, readme=readme)
    values |= {"source": str(source), "step": metadata.get("step")}
    values["missing"] = dict.fromkeys(extras.missing, reason)
    values["chat_template"] = template
    emit(lambda: values, lambda: _screen(values), as_json=json_output)
    if extras.endless:
        typer.echo(
            f"warning: {extras.endless} has no eos_token_id, so programs that load this model "
            "never stop generating; --tokenizer DIR takes it from another model",
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
    from sppo.model.hf_writing import save_hf_weights

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
    return {
        "destination": str(destination),
        "family": hf_config(model, dtype=dtype)["model_type"],
        "dtype": dtype,
        "num_parameters": saved.num_parameters,
        "total_bytes": saved.total_bytes,
        "files": list(saved.files),
        "copied": list(extras.files),
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


def _provenance(metadata: dict[str, Any], *, source: Path) -> str:
    """Return a README on the runs that a run started from, one after another; "" if from none."""
    start = metadata.get("start")
    if not isinstance(start, dict):
        return ""
    lines = [
        f"# {source.name}",
        f"Trained by SPPO {__version__}: step {metadata['step']} of {source}.",
    ]
    while isinstance(start, dict):
        lines.append(
            f"Started from step {start['step']} of another run: {start['path']} (SHA-256 of its "
            f"manifest: {start['digest']})."
        )
        start = start.get("start")
    return "\n\n".join(lines) + "\n"


def _token_directories(metadata: dict[str, Any]) -> list[Path]:
    """Return the token data of the run that wrote a checkpoint, of each source."""
    data = metadata["config"].get("data", {})
    sources = data.get("sources") or {"": data}
    return [Path(source["tokens"]) for source in sources.values() if source.get("tokens")]


def _chosen_extras(directory: Path) -> tuple[Extras, str]:
    """Return the extras in a given directory, and where those that are missing are missing.

    Raises:
        ValueError: The directory cannot be read, or holds no tokenizer.
    """
    found = read_extras(directory)
    if "tokenizer" in found.missing:
        raise ValueError(f"--tokenizer {directory} holds no tokenizer files")
    return found, f"none in {directory}"


def _run_extras(from_hf: str | None) -> tuple[Extras, str]:
    """Return the extras of the model that a run started from, and why some are missing.

    A directory that is gone or damaged by now stops no export.
    """
    if from_hf is None:
        return Extras(), "the run started from random weights"
    try:
        return read_extras(Path(from_hf)), f"none in model.from_hf, {from_hf}"
    except (OSError, ValueError) as error:
        return Extras(), f"model.from_hf: {error}"


def _screen(values: dict[str, Any]) -> Screen:
    """Yield what was written, taken along, missing and ignored."""
    step = f" after step {values['step']}" if values.get("step") is not None else ""
    yield Unbroken(
        f"{values['destination']}: {values['family']}{step}, "
        f"{format_count(values['num_parameters'])} parameters in {values['dtype']}, "
        f"{format_bytes(values['total_bytes'])} in {counted(len(values['files']), 'file')}"
    )
    if values["copied"]:
        yield f"copied: {', '.join(values['copied'])}"
    if values.get("chat_template"):
        yield f"chat template: {values['chat_template']}"
    missing = values.get("missing", {})
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, own in missing.items() if own == reason)
        yield Unbroken(f"missing: {names} ({reason})")
    if values.get("ignored"):
        yield f"not applied in training: {', '.join(values['ignored'])}"
