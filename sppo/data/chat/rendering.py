"""Rendering of chat templates in jinja2's sandbox, as transformers renders them.

Templates come with models of strangers. The sandbox refuses attributes that lead out of it, and a
rendering has bounded numbers of steps and of characters, so that none runs for ever or fills the
memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_STEPS = 2_000_000
"""Most iterations of loops and calls of one rendering."""
_LEAST_ROOM = 64 << 20
_ROOM_PER_CHARACTER = 256
"""Characters that a rendering may make for each character of its values, all texts together."""
_LARGEST_ARGUMENT = 1 << 20
_MOST_BITS = 1 << 12
_STEP = "sppo_step"
"""Filter that counts an iteration."""


class RenderingError(ValueError):
    """Template that refuses its values, fails or goes beyond a bound; the message says which."""


def render(
    text: str, values: Mapping[str, Any], *, today: date
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Render a template; return the text, and the spans [start, end) of its generation marks.

    Args:
        text: Text of the template.
        values: Variables of the template, as plain JSON values.
        today: Day that ``strftime_now`` tells.

    Raises:
        RenderingError: The template refuses the values, fails, or goes beyond a bound.
    """
    state = _Rendering(_LEAST_ROOM + _ROOM_PER_CHARACTER * _characters(values), MOST_STEPS)
    now = {"strftime_now": lambda form: today.strftime(str(form))}
    token = _current.set(state)
    blocks = []
    try:
        for block in compiled(text).generate(now, **values):
            blocks.append(block)
            state.length += len(state.made(block))
    except RenderingError:
        raise
    except RecursionError:
        raise RenderingError("it calls itself without an end") from None
    except MemoryError:
        raise RenderingError("it makes text that does not fit into memory") from None
    except Exception as error:  # a template runs operators on values of any type
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise RenderingError(f"{kind}{error}") from None
    finally:
        _current.reset(token)
    rendered = "".join(blocks)
    for start, marked in state.marks:
        if not rendered.startswith(marked, start):
            raise RenderingError(
                "a {% generation %} block stands in a macro or a {% set %} block, where its place"
                " in the text cannot be told"
            )
    return rendered, tuple((start, start + len(marked)) for start, marked in state.marks)


def _characters(value: Any) -> int:
    """Return the number of characters in JSON values."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0


@dataclass(slots=True)
class _Rendering:
    """State of one rendering."""

    room: int
    """Characters and items that may still be made."""
    steps: int
    """Steps that may still be made."""
    length: int = 0
    """Characters rendered so far."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Start and text of each ``{% generation %}`` block."""

    def step(self) -> None:
        """Count one iteration or call."""
        self.steps -= 1
        if self.steps < 0:
            raise RenderingError(f"it takes more than {MOST_STEPS:,} steps; does it ever end?")

    def check_product(self, *values: Any) -> None:
        """Refuse texts of which each character of one may become another one, or many blanks."""
        sizes = sorted(len(one) for one in values if isinstance(one, str | list | tuple | range))
        sizes = sorted([*sizes, *(abs(one) for one in values if sizes and isinstance(one, int))])
        if len(sizes) > 1 and sizes[-1] * sizes[-2] > 4 * _LEAST_ROOM + 4 * self.room:
            raise RenderingError("it makes values far larger than its messages")

    def made(self, value: Any) -> Any:
        """Count the characters or items of a value, and return it."""
        if isinstance(value, str | list | tuple | dict):
            self.room -= _weight(value, {})
        if self.room < 0 or isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise RenderingError("it makes values far larger than its messages")
        return value


def _weight(value: Any, known: dict[int, int]) -> int:
    """Return the characters and items of a value as it would be written.

    Args:
        value: Value, which may have the same list in several places.
        known: Weights of the lists and mappings met so far, by ``id``.
    """
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_weight(item, known) for item in items)
    return known[id(value)]


_current: ContextVar[_Rendering] = ContextVar("rendering")


@lru_cache(maxsize=16)
def compiled(text: str) -> Template:
    """Return a template that counts its steps and what it makes.

    Raises:
        jinja2.TemplateSyntaxError: The text is not a template.
    """
    environment = _Environment()
    return environment.from_string(_Counting(environment).visit(environment.parse(text)))


def has_marks(text: str) -> bool:
    """Return whether a template has ``{% generation %}`` blocks."""
    blocks = _Environment().parse(text).find_all(nodes.CallBlock)
    return any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks)


@lru_cache(maxsize=16)
def looks_for(text: str) -> tuple[str, ...]:
    """Return the texts that a template looks for in others, or gives to functions for texts.

    They are the constants in ``'</think>' in content``, in arguments such as those of
    ``content.split('</think>')``, and in ``{% set end = '</think>' %}``.
    """
    tree = _Environment().parse(text)
    constants: list[nodes.Node] = [
        *(compared.expr for compared in tree.find_all(nodes.Compare) if _is_search(compared)),
        *(item for call in tree.find_all(nodes.Call) for item in call.args),
        *(item for used in tree.find_all(nodes.Filter) for item in used.args),
        *(assigned.node for assigned in tree.find_all(nodes.Assign)),
    ]
    values = (node.value for node in constants if isinstance(node, nodes.Const))
    return tuple({value for value in values if isinstance(value, str) and value.strip()})


def _is_search(compared: nodes.Compare) -> bool:
    return any(operand.op in ("in", "notin") for operand in compared.ops)


class _Generation(Extension):
    """The block ``{% generation %}``, and what :class:`_Counting` adds to templates."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Return the node of a block: a call of :meth:`mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body, lineno=line)

    def mark(self, caller: Callable[[], str]) -> str:
        """Record where a block stands, and return its text."""
        state, text = _current.get(), caller()
        state.marks.append((state.length, text))
        return text

    def collected(self, value: Any) -> Any:
        """Return a list or mapping, which the environment counts."""
        return value

    def join(self, *parts: Any) -> str:
        """Return values as one text, as the operator ``~`` does."""
        return "".join(map(str, parts))


class _Counting(NodeTransformer):
    """Begins iterations of loops with a step, and makes calls of ``~``, lists and mappings."""

    def __init__(self, environment: _Environment) -> None:
        self._extension = environment.extensions[_Generation.identifier]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Begin each iteration with a filter that counts it, which is faster than a call."""
        self.generic_visit(node)
        step = nodes.Filter(nodes.Const(None), _STEP, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Join by a call."""
        self.generic_visit(node)
        return self._extension.call_method("join", node.nodes, lineno=node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        """Collect values by a call."""
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in node.iter_child_nodes()):
            return node
        return self._extension.call_method("collected", [node], lineno=node.lineno)

    visit_Dict = visit_List

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """Pass the text of a block through a filter, which the environment counts."""
        self.generic_visit(node)
        node.filter = node.filter or nodes.Filter(None, "string", [], [], None, None)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Collect values by a call; names that are set stay."""
        return self.visit_List(node) if node.ctx == "load" else node


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox with the settings and functions of transformers, and with bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # values are computed in renderings alone, where they are counted
            extensions=[_Generation, loopcontrols],
        )
        self.filters = {name: _counted(function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _counted(_to_json), _STEP: lambda _: _current.get().step()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "namespace": _Namespace, "dict": _new_dict}

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template, and count the call and its value."""
        _check_arguments(*args, *kwargs.values())
        state = _current.get()
        state.step()
        state.check_product(getattr(function, "__self__", None), *args, *kwargs.values())
        return state.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, and count its value."""
        if operator == "*":
            sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
            numbers = [side for side in (left, right) if isinstance(side, int)]
            if sizes and numbers:
                _check_arguments(sizes[0] * numbers[0])
        elif operator == "**":
            _check_arguments(left, right * 256 if isinstance(right, int) else right)
        return _current.get().made(super().call_binop(context, operator, left, right))


def _check_arguments(*values: Any) -> None:
    """Refuse numbers that serve for nothing but large values, such as the width of a text."""
    for value in values:
        if isinstance(value, int) and abs(value) > _LARGEST_ARGUMENT:
            raise RenderingError(f"it computes with {value:,}, a number too large for its bounds")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(*args, *kwargs.values())
        state = _current.get()
        state.check_product(*args, *kwargs.values())
        return state.made(function(*args, **kwargs))

    return counted


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: Any) -> None:
    raise TemplateError(str(message))


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Namespace without private names, by which a template could pose as another object."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"namespaces hold no private name such as {name!r}")
        super().__setitem__(name, value)
