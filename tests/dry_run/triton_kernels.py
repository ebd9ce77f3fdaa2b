"""Analysis of which parameters' memory a Triton kernel reads and writes, without a GPU.

The source of the kernel is analysed: a parameter is read or written if a pointer computed from it
reaches ``tl.load`` or ``tl.store``, in the kernel or in functions that it calls.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

_READS = {"load", "make_block_ptr"}
_WRITES = {"store"}
_BOTH = {"atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas"}


@dataclass(frozen=True, slots=True)
class PointerUse:
    """Names of a kernel's parameters through which memory is read, and written.

    Integer parameters from which addresses are computed are included.
    """

    reads: frozenset[str]
    writes: frozenset[str]


def pointer_use(kernel: Any) -> PointerUse:
    """Return the parameters through which a ``triton.jit`` function reads and writes memory."""
    return _pointer_use(kernel.fn)


@lru_cache(maxsize=256)
def _pointer_use(function: FunctionType) -> PointerUse:
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef))
    finder = _PointerFinder(definition, function.__globals__)
    # A second visit propagates assignments at the end of a loop to its next iteration.
    for _ in range(2):
        finder.generic_visit(definition)
    return PointerUse(frozenset(finder.reads), frozenset(finder.writes))


class _PointerFinder(ast.NodeVisitor):
    """Visitor that follows parameters through assignments to loads and stores."""

    def __init__(self, definition: ast.FunctionDef, names: Mapping[str, Any]) -> None:
        self._globals = names
        self._made_of = {a.arg: frozenset({a.arg}) for a in definition.args.args}
        self.reads: set[str] = set()
        self.writes: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, self._parameters(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        self.generic_visit(node)
        self._assign(node.target, self._parameters(node.value) | self._parameters(node.target))

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if name in _READS | _BOTH:
            self.reads |= self._parameters(node.args[0])
        if name in _WRITES | _BOTH:
            self.writes |= self._parameters(node.args[0])
        named = self._globals.get(node.func.id) if isinstance(node.func, ast.Name) else None
        helper = getattr(named, "fn", None)
        if isinstance(helper, FunctionType):
            self._call(helper, node)

    def _call(self, helper: FunctionType, node: ast.Call) -> None:
        names = list(inspect.signature(helper).parameters)
        given = dict(zip(names, node.args, strict=False))
        given |= {word.arg: word.value for word in node.keywords if word.arg is not None}
        use = _pointer_use(helper)
        for name, value in given.items():
            if name in use.reads:
                self.reads |= self._parameters(value)
            if name in use.writes:
                self.writes |= self._parameters(value)

    def _assign(self, target: ast.expr, parameters: frozenset[str]) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self._made_of[name.id] = self._made_of.get(name.id, frozenset()) | parameters

    def _parameters(self, node: ast.expr) -> frozenset[str]:
        """Return the parameters of which an expression's address is computed; none for a load."""
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if name in _READS - {"make_block_ptr"}:
                return frozenset()
        if isinstance(node, ast.Name):
            return self._made_of.get(node.id, frozenset())
        found = [self._parameters(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return frozenset().union(*found)
