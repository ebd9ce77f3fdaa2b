"""Type checks of the arguments of the Python interface."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from os import PathLike
from typing import Any

from sppo.config.run import RunConfig
from sppo.planning.plan import ExecutionPlan
from sppo.quoting import quoted

PATH = (str, PathLike)
_ADVICE: dict[Any, str] = {
    RunConfig: "a run of sppo.load_run",
    ExecutionPlan: "a plan of sppo.solve or sppo.load_plan",
    PATH: "a path, as text or as pathlib.Path",
    Integral: "a whole number",
    Callable: "a function",
    str: "text",
    None: "leave it out",
}
"""Advice in error messages, by expected type."""


def check_argument(function: str, name: str, value: object, *kinds: Any) -> None:
    """Raise TypeError if `value` has none of the types `kinds`.

    Args:
        function: Name of the called function, e.g. ``sppo.solve``.
        name: Name of the argument.
        value: Value of the argument.
        kinds: Keys of ``_ADVICE``: types, :data:`PATH`, and None for an optional argument.

    Raises:
        TypeError: The value has another type; the message says what to give instead.
    """
    if value is None and None in kinds:
        return
    types = tuple(kind for kind in kinds if kind is not None)
    if not isinstance(value, types) or isinstance(value, bool):
        advice = ", or ".join(_ADVICE[kind] for kind in kinds)
        raise TypeError(f"{function}({name}={quoted(value)}): give it {advice}")
