"""Files beside the weights that a run is exported with: tokenizer, chat template, README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sppo.data.trained_tokenizer import template_change, trained_tokenizer, with_trained
from sppo.model.huggingface.extras import Extras, read_extras
from sppo.version import __version__


def run_extras(
    metadata: dict[str, Any], chosen: tuple[Extras, str] | None
) -> tuple[Extras, dict[str, Any]]:
    """Return the extras beside a run's weights, and what is said of them, as JSON values.

    Args:
        metadata: Metadata of a checkpoint of the run.
        chosen: Result of :func:`chosen_extras`; None for what the run was trained with.
    """
    extras, reason = chosen or _extras_of_base(metadata["config"]["model"].get("from_hf"))
    template = None
    directories = [] if chosen else _token_directories(metadata)
    if trained := trained_tokenizer(directories):
        template = template_change(extras, trained)
        extras = with_trained(extras, trained)
    elif gone := next((path for path in directories if not path.exists()), None):
        template = f"that of the base, if it has one: {gone}, the run's tokens, is not there"
    missing = dict.fromkeys(extras.missing, reason)
    return extras, {"missing": missing, "chat_template": template}


def new_end(extras: Extras, *, base: str) -> Any:
    """Return the ids that end a text if those of the base of an adapter are others, else None."""
    ends, (known, _) = extras.token_ids.get("eos_token_id"), _extras_of_base(base)
    return None if ends == known.token_ids.get("eos_token_id") else ends


def chosen_extras(directory: Path) -> tuple[Extras, str]:
    """Return the extras in a given directory, and where those that are missing are missing.

    Raises:
        ValueError: The directory cannot be read, or holds no tokenizer.
    """
    found = read_extras(directory)
    if "tokenizer" in found.missing:
        raise ValueError(f"--tokenizer {directory} holds no tokenizer files")
    return found, f"none in {directory}"


def _extras_of_base(from_hf: str | None) -> tuple[Extras, str]:
    """Return the extras of the model that a run started from, and why some are missing.

    A directory that is gone or damaged by now stops no export.
    """
    if from_hf is None:
        return Extras(), "the run started from random weights"
    try:
        return read_extras(Path(from_hf)), f"none in model.from_hf, {from_hf}"
    except (OSError, ValueError) as error:
        return Extras(), f"model.from_hf: {error}"


def _token_directories(metadata: dict[str, Any]) -> list[Path]:
    """Return the token data of the run that wrote a checkpoint, of each source."""
    data = metadata["config"].get("data", {})
    sources = data.get("sources") or {"": data}
    return [Path(source["tokens"]) for source in sources.values() if source.get("tokens")]


def provenance_readme(metadata: dict[str, Any], *, source: Path) -> str:
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
