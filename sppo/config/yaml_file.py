"""Reading of YAML with the booleans and numbers of YAML 1.2, and without duplicate keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sppo.config.problems import ConfigError, Problem
from sppo.config.text_file import NotTextError, read_text_file
from sppo.quoting import one_line, quoted

_MOST_BYTES = 4 << 20
_NEIGHBOURS = 5
_MERGE = "tag:yaml.org,2002:merge"
_Pair = tuple[yaml.Node, yaml.Node]
"""A key of a mapping, and its value."""


class StrictLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars (``on`` is a word, ``3e-4`` a number) and unique keys."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace each ``<<: *anchor`` of a mapping by the keys and values of the anchor.

        A key given beside the merge counts, then the first merged mapping that has the key.
        PyYAML's own method is not called: 6.0.3 and 6.0.4 keep different values.

        Raises:
            yaml.MarkedYAMLError: A key is given twice, or a merge names no mapping.
        """
        given = self._given_keys(node)
        merges = [value for key, value in node.value if key.tag == _MERGE]
        node.value = list(given.values())
        merged: dict[Any, _Pair] = {}
        for mapping in self._merged_mappings(merges):
            for key_node, value in mapping.value:
                key = self.construct_object(key_node, deep=True)
                merged.setdefault(key, (key_node, value))
        node.value = [pair for key, pair in merged.items() if key not in given] + node.value

    def _given_keys(self, node: yaml.MappingNode) -> dict[Any, _Pair]:
        """Return the pairs of a mapping by key, merges left out."""
        given: dict[Any, _Pair] = {}
        for key_node, value in node.value:
            mark = key_node.start_mark
            if key_node.tag == _MERGE:
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                rule = "a key is a word, not a list or a mapping"
                raise yaml.MarkedYAMLError(problem=rule, problem_mark=mark)
            key = self.construct_object(key_node, deep=True)
            if key in given:
                first = given[key][0].start_mark.line + 1
                rule = f"key {quoted(key)} is given twice (first in line {first}); keep one"
                raise yaml.MarkedYAMLError(problem=rule, problem_mark=mark)
            given[key] = (key_node, value)
        return given

    def _merged_mappings(self, merges: list[yaml.Node]) -> Iterator[yaml.MappingNode]:
        """Yield the flattened mappings that the values of ``<<`` name, each a mapping or a list."""
        for value in merges:
            listed = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for mapping in listed:
                if not isinstance(mapping, yaml.MappingNode):
                    rule = "<< merges a mapping or a list of mappings: <<: *anchor"
                    raise yaml.MarkedYAMLError(problem=rule, problem_mark=mapping.start_mark)
                self.flatten_mapping(mapping)
                yield mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of `node`; errors of PyYAML's constructors are raised with the line."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            rule = one_line(f"cannot be read as {kind}: {error}".partition(";")[0])
            raise yaml.MarkedYAMLError(problem=rule, problem_mark=node.start_mark) from None

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Read ``010`` as ten: YAML 1.2 has no octal numbers with a leading zero."""
        return int(self.construct_scalar(node))


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_decimal)
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
    """Return the value of a YAML document.

    Raises:
        ConfigError: The text is not valid YAML; the error names the line.
    """
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}" if mark else "somewhere"
        parts = (one_line(part) for part in (error.context, error.problem) if part)
        rule = ", ".join(parts)
        if r"'\t'" in rule:
            rule += "; indent with spaces, not with tabs"
        if "<block end>" in rule:
            rule += "; let the keys of a section begin in one column"
        raise ConfigError(source, [Problem(where, "", rule)]) from None
    except yaml.YAMLError as error:
        rule = one_line(f"is not YAML text: {error}".partition("\n")[0])
        raise ConfigError(source, [Problem("", "", rule)]) from None
    except RecursionError:
        raise ConfigError(source, [Problem("", "", "is nested too deeply")]) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`.

    Raises:
        ConfigError: The file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        text = read_text_file(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(str(path), [Problem("", "", _not_found(path))]) from None
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ConfigError(str(path), [Problem("", "", rule)]) from None
    except NotTextError as error:
        raise ConfigError(str(path), [Problem("", "", f"no YAML text: {error.rule}")]) from None
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
    near = difflib.get_close_matches(path.name, names, n=_NEIGHBOURS, cutoff=0.0)
    return "no such file" + (f"; beside it: {', '.join(near)}" if near else "")
