"""YAML as people expect it: 1.2 booleans and floats, every key once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sppo.config.problems import ConfigError, Problem


class StrictLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars (``on`` is a word, ``3e-4`` a number) and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that was given twice instead of keeping the last one."""
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice (first in line {seen[key]}); keep one",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp")}
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")
)
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, *, source: str) -> Any:
    """The value of one YAML document.

    Raises:
        ConfigError: not valid YAML, with the line.
    """
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}" if mark else "somewhere"
        raise ConfigError(source, [Problem(where, "", str(error.problem))]) from None
    except yaml.YAMLError as error:
        raise ConfigError(source, [Problem("", "", str(error))]) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in ``path``.

    Raises:
        ConfigError: missing, unreadable, not YAML or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), [Problem("", "", _not_found(path))]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [Problem("", "", f"cannot be read: {error}")]) from None
    value = parse_yaml(text, source=str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        rule = "a run file is a mapping of sections: model, data, sequence, ..."
        raise ConfigError(str(path), [Problem("", "", rule)])
    return value


def _not_found(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"no such file, and no directory {folder}"
    names = sorted(p.name for p in folder.iterdir() if p.suffix in {".yaml", ".yml"})
    beside = f"; beside it: {', '.join(names[:5])}" if names else ""
    return f"no such file{beside}"
