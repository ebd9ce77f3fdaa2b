"""``sppo convert``: conversion of weights from and to Hugging Face directories."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sppo.cli.arguments.common import Json
from sppo.cli.command_group import CommandGroup
from sppo.cli.exit_codes import exit_codes

if TYPE_CHECKING:
    from sppo.config.model import ModelConfig
    from sppo.model.hf import SavedWeights

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

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


@app.callback()
def convert() -> None:
    """Convert weights from and to the standard Hugging Face layout."""


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
    from sppo.config.huggingface import ignored_settings, model_fields, read_config
    from sppo.model.hf_files import check_headers, tokenizer_files
    from sppo.output_file import check_unused_directory
    from sppo.units import parse_size

    with exit_codes():
        check_unused_directory(destination)
        max_shard_bytes = parse_size(max_shard_size)
        config = read_config(source)
        model = _model(model_fields(config), source=source)
        check_headers(source, model)
        from sppo.model.hf import open_hf_weights, save_hf_weights

        weights = open_hf_weights(source, model)
        kind = _name_of(weights.dtype) if dtype is StoredType.KEEP else dtype.value
        extra_files = tokenizer_files(source)
        saved = save_hf_weights(
            destination,
            weights,
            model,
            dtype=kind,
            max_shard_bytes=max_shard_bytes,
            token_ids=_token_ids(config),
            extra_files=extra_files,
        )
    report = _report(source, destination, model=model, dtype=kind, saved=saved)
    report["copied"] = [path.name for path in extra_files]
    report["ignored"] = list(ignored_settings(config))
    _show(report, json_output=json_output)


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
        typer.Option(metavar="DIR", help="Copy the tokenizer and the special token ids from DIR."),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="auto|llama|qwen2|qwen3|mistral|gpt2",
            help="Write as this family; auto takes the first that computes the same model."
            " [default: the run's model.family]",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Write the trained weights of a run as a model that transformers and similar programs load.

    The stored type is train.dtype of the run unless --dtype names another.

        sppo convert to-hf runs/quickstart models/quickstart --tokenizer downloads/Qwen3-0.6B
    """
    from sppo.checkpoint.newest import check_any
    from sppo.output_file import check_unused_directory
    from sppo.units import parse_size

    with exit_codes():
        check_unused_directory(destination)
        max_shard_bytes = parse_size(max_shard_size)
        extra_files, token_ids = _tokenizer(tokenizer)
        check_any(source)
        from sppo.checkpoint.checkpoint import read_model
        from sppo.model.hf import save_hf_weights

        metadata, weights = read_model(source)
        fields, trained_as = _trained(metadata, source=source)
        if family is not None:
            fields["family"] = None if family == "auto" else family
        model = _model(fields, source=source)
        kind = trained_as if dtype is StoredType.KEEP else dtype.value
        saved = save_hf_weights(
            destination,
            weights,
            model,
            dtype=kind,
            max_shard_bytes=max_shard_bytes,
            token_ids=token_ids,
            extra_files=extra_files,
        )
    report = _report(source, destination, model=model, dtype=kind, saved=saved)
    report["copied"] = [path.name for path in extra_files]
    report["step"] = metadata.get("step")
    _show(report, json_output=json_output)


def _model(fields: dict[str, Any], *, source: Path) -> ModelConfig:
    """Return the validated model configuration of `fields`.

    Raises:
        ConfigError: Fields are out of range; the error lists all of them.
    """
    from pydantic import ValidationError

    from sppo.config.model import ModelConfig
    from sppo.config.problems import ConfigError, problems_of

    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        annotations = {key: info.annotation for key, info in ModelConfig.model_fields.items()}
        raise ConfigError(str(source), problems_of(error, "model", annotations)) from None


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


def _tokenizer(directory: Path | None) -> tuple[list[Path], dict[str, Any]]:
    """Return the tokenizer files to copy, and the special token ids if there is a config.json."""
    from sppo.config.huggingface import read_config
    from sppo.model.hf_files import tokenizer_files

    if directory is None:
        return [], {}
    files = tokenizer_files(directory)
    if not files:
        raise ValueError(f"--tokenizer {directory} holds no tokenizer files")
    has_config = (directory / "config.json").is_file()
    return files, _token_ids(read_config(directory)) if has_config else {}


def _token_ids(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in _TOKEN_IDS if key in config}


def _name_of(dtype: object) -> str:
    from sppo.model.hf import DTYPES

    return next(name for name, known in DTYPES.items() if known == dtype)


def _report(
    source: Path, destination: Path, *, model: ModelConfig, dtype: str, saved: SavedWeights
) -> dict[str, Any]:
    from sppo.config.huggingface import hf_config

    return {
        "source": str(source),
        "destination": str(destination),
        "family": hf_config(model, dtype=dtype)["model_type"],
        "dtype": dtype,
        "num_parameters": saved.num_parameters,
        "total_bytes": saved.total_bytes,
        "files": list(saved.files),
    }


def _show(report: dict[str, Any], *, json_output: bool) -> None:
    import json

    from sppo.units import counted, format_bytes, format_count

    if json_output:
        typer.echo(json.dumps(report, indent=2))
        return
    count = len(report["files"])
    step = f" after step {report['step']}" if report.get("step") is not None else ""
    typer.echo(
        f"{report['destination']}: {report['family']}{step}, "
        f"{format_count(report['num_parameters'])} parameters in {report['dtype']}, "
        f"{format_bytes(report['total_bytes'])} in {counted(count, 'file')}"
    )
    if report["copied"]:
        typer.echo(f"copied: {', '.join(report['copied'])}")
    if report.get("ignored"):
        typer.echo(f"not applied in training: {', '.join(report['ignored'])}")
