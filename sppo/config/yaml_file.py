"""Reading and writing of YAML 1.2: ``on`` is a word, ``3e-4`` a number, and every key is unique."""

from __future__ import annotations

import difflib
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode

from sppo.config.problems import ConfigError, Problem
from sppo.quoting import one_line, quoted
from sppo.text_file import NotTextError, read_text_file

_MOST_BYTES = 4 << 20
_NEIGHBOURS = 5


class _Constructor(SafeConstructor):
    """Constructor of plain values; dates are words, as YAML 1.2 has none."""

    def flatten_mapping(self, node: MappingNode) -> None:
        """Check that the keys of a mapping are different words, then replace its merges.

        Raises:
            MarkedYAMLError: A key is given twice or is no word, or a merge names no mapping.
        """
        lines: dict[str, int] = {}
        was_merged = getattr(node, "merge", None) is not None
        for key, _ in () if was_merged else node.value:
            mark = key.start_mark
            if not isinstance(key, ScalarNode):
                rule = "a key is a word, not a list or a mapping"
                raise MarkedYAMLError(problem=rule, problem_mark=mark)
            if key.value in lines:
                first = lines[key.value]
                rule = f"key {quoted(key.value)} is given twice (first in line {first}); keep one"
                raise MarkedYAMLError(problem=rule, problem_mark=mark)
            lines[key.value] = mark.line + 1
        super().flatten_mapping(node)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str, *, source: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        ConfigError: The text is not valid YAML; the error names the line.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    where = ""
    try:
        return yaml.load(text)
    except MarkedYAMLError as error:
        if error.problem_mark is not None:
            where = f"line {error.problem_mark.line + 1}"
        rule = ", ".join(one_line(part) for part in (error.context, error.problem) if part)
        if r"'\t'" in rule:
            rule += "; indent with spaces, not with tabs"
        if "<block end>" in rule:
            rule += "; let the keys of a section begin in one column"
        if "alias" in rule:
            rule += "; put text that begins with * in quotes"
    except YAMLError as error:
        rule = one_line(f"is not YAML text: {error}".partition("\n")[0])
    except (ValueError, LookupError, AttributeError) as error:
        rule = one_line(f"a value cannot be read: {error}".partition(";")[0])
    except RecursionError:
        rule = "is nested too deeply"
    raise ConfigError(source, [Problem(where, "", rule)])


def format_yaml(value: Any) -> str:
    """Return plain values as YAML, one key in a line, in the order of `value`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    text = StringIO()
    yaml.dump(value, text)
    return text.getvalue()


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`.

    Raises:
        ConfigError: The file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        text = read_text_file(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        rule = _not_found(path)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
    except NotTextError as error:
        rule = str(error)
    else:
        value = parse_yaml(text, source=str(path))
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        rule = "a run file is a mapping of sections: model, data, sequence, ..."
    raise ConfigError(str(path), [Problem("", "", rule)])


def _not_found(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"no such file, and no directory {folder}"
    names = sorted(p.name for p in folder.iterdir() if p.suffix in {".yaml", ".yml"})
    near = difflib.get_close_matches(path.name, names, n=_NEIGHBOURS, cutoff=0.0)
    return "no such file" + (f"; beside it: {', '.join(near)}" if near else "")
