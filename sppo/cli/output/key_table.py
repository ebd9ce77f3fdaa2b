"""Keys of a ``KEY=VALUE`` request for a command's help: name, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from sppo.cli.output.printing import table
from sppo.config.base import Section


def print_keys(section: type[Section]) -> None:
    """Print one row per key of `section`; required keys come first."""
    console = Console()
    console.print("Keys", style="bold")
    console.print(table(("key", "default", "meaning"), key_rows(section), left=3))


def key_rows(section: type[Section]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of the keys of `section`; required keys come first."""
    fields = section.model_fields
    for key in sorted(fields, key=lambda key: not fields[key].is_required()):
        field = fields[key]
        default = "required" if field.is_required() else _default_text(field.default)
        meaning = " ".join((field.description or "").split())
        yield key, default, meaning.replace("``", "")


def _default_text(value: object) -> str:
    if value is None:
        return ""
    entries = value if isinstance(value, tuple) else (value,)
    return ",".join(f"{v:g}" if isinstance(v, (int, float)) else str(v) for v in entries)
