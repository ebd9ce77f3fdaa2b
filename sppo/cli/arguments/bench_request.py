"""Keys of ``sppo bench``: precisions, and shapes that replace the axes of the default grids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from sppo.config.base import ComputeDtype, Section, Size
from sppo.config.key_values import comma_list
from sppo.config.problems import nearest
from sppo.units import format_tokens, parse_size

if TYPE_CHECKING:
    from sppo.bench.attention_grid import AttentionGrid
    from sppo.bench.gemm import GemmGrid
    from sppo.bench.suite import Grids

_Grid = TypeVar("_Grid", "AttentionGrid", "GemmGrid")
_T = TypeVar("_T")
_GEMM_KEYS = ("tokens", "width")
_ALL_KEYS = ("dtype",)
"""Keys that apply to every subject; those of neither list apply to attention."""


def _each_once(values: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(values))


def _ascending(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _head_counts(value: object) -> tuple[int, int]:
    """Return the counts in ``32/8`` (query/key-value heads), or ``32`` for as many of both."""
    counts = [parse_size(count) for count in str(value).split("/")]
    if len(counts) > 2 or min(counts) < 1:
        raise ValueError("write query/key-value heads, such as 32/8, or 32 for as many of both")
    queries, kv = counts[0], counts[-1]
    if queries % kv:
        raise ValueError(
            f"{queries} query heads cannot share {kv} key-value heads evenly; write N/K with K "
            "dividing N, such as 32/8, or N alone"
        )
    return queries, kv


def _known_backend(name: str) -> str:
    from sppo.bench.attention_backends import BACKENDS

    if name not in BACKENDS:
        raise ValueError(f"not one of {', '.join(BACKENDS)}.{nearest(name, BACKENDS)}")
    return name


_LIST: tuple[Any, ...] = (BeforeValidator(comma_list), Field(min_length=1))
_Sizes = Annotated[tuple[Annotated[Size, Field(ge=1)], ...], *_LIST, AfterValidator(_ascending)]
_Heads = Annotated[tuple[int, int], BeforeValidator(_head_counts)]
_Backend = Annotated[str, AfterValidator(_known_backend)]


class BenchKeys(Section):
    """Precisions and shapes to measure, each a list with commas; None takes the default grid's."""

    dtype: Annotated[tuple[ComputeDtype, ...], *_LIST, AfterValidator(_each_once)] = (
        "bf16",
        "fp32",
    )
    """Precisions."""
    queries: _Sizes | None = None
    """attention: queries of a span, such as 4Ki,16Ki; there are 1 to 8 times as many keys."""
    keys: _Sizes | None = None
    """attention: keys that the queries are the last of, such as 32Ki,64Ki."""
    heads: Annotated[tuple[_Heads, ...], *_LIST, AfterValidator(_each_once)] | None = None
    """attention: query/key-value heads, such as 32/8,32; plans take the first."""
    head_size: _Sizes | None = None
    """attention: sizes of a head, such as 64,128."""
    backend: Annotated[tuple[_Backend, ...], *_LIST, AfterValidator(_each_once)] | None = None
    """attention: back ends, such as cudnn,torch_flash; all that can if left out."""
    tokens: _Sizes | None = None
    """gemm: rows of the input, such as 2Ki,8Ki."""
    width: _Sizes | None = None
    """gemm: width of the input and the output, such as 4Ki,8Ki."""

    def check_subjects(self, subject: str, parts: Sequence[str]) -> None:
        """Raise ValueError if a key was given that no measured subject uses.

        Args:
            subject: Subject named on the command line.
            parts: Single subjects to measure.
        """
        for key in self.model_fields_set.difference(_ALL_KEYS):
            user = "gemm" if key in _GEMM_KEYS else "attention"
            if user not in parts:
                raise ValueError(
                    f"{key}: only sppo bench {user} and all use it; leave it out of sppo bench "
                    f"{subject}"
                )


def asked_grids(asked: BenchKeys, *, device: str, quick: bool, for_plans: bool) -> Grids:
    """Return the default grids with the axes replaced that the command line gives.

    Args:
        asked: Keys of the command line.
        device: "cpu" or "cuda".
        quick: Use few shapes on axes that the command line does not give.
        for_plans: Whether the rates go into a hardware description.

    Raises:
        ValueError: Shapes that contradict each other or that plans cannot read, or a back end that
            can run none of the shapes.
    """
    from sppo.bench.attention_grid import Heads
    from sppo.bench.suite import default_grids

    grids = default_grids(device, quick=quick)
    attention = _with_axes(
        grids.attention,
        queries=asked.queries,
        keys=asked.keys,
        heads=asked.heads and tuple(Heads(*counts) for counts in asked.heads),
        head_sizes=asked.head_size,
        backends=asked.backend,
    )
    _check_keys(attention)
    _check_backends(attention, device=device, dtypes=asked.dtype)
    if for_plans:
        _check_for_plans(attention, device=device, dtypes=asked.dtype)
    gemm = _with_axes(grids.gemm, tokens=asked.tokens, widths=asked.width)
    return replace(grids, gemm=gemm, attention=attention)


def _with_axes(grid: _Grid, **axes: object) -> _Grid:
    """Return `grid` with the axes that are not None; it is fixed if there is one."""
    given: dict[str, Any] = {name: axis for name, axis in axes.items() if axis is not None}
    return replace(grid, **given, fixed=bool(given))


def _check_keys(grid: AttentionGrid) -> None:
    """Raise ValueError if there are fewer keys than queries, which are the last of their keys."""
    if grid.keys is not None and grid.keys[0] < grid.queries[-1]:
        keys, queries = format_tokens(grid.keys[0]), format_tokens(grid.queries[-1])
        raise ValueError(
            f"keys={keys}: fewer than {queries} queries, which are the last of them; ask for keys "
            f"from {queries} on, or for queries up to {keys}"
        )


def _check_backends(grid: AttentionGrid, *, device: str, dtypes: Sequence[str]) -> None:
    """Raise ValueError if a requested back end can run none of the shapes.

    A back end that can run some of the shapes is accepted; the other shapes are gaps in its
    results.
    """
    from sppo.bench.attention_backends import why_never_timed

    for name in grid.backends or ():
        reason = why_never_timed(name, grid, dtypes=dtypes, device=device)
        if reason is not None:
            raise ValueError(
                f"backend={name}: {reason}; ask for others, or leave backend out to time all that "
                "can run here"
            )


def _check_for_plans(grid: AttentionGrid, *, device: str, dtypes: Sequence[str]) -> None:
    """Raise ValueError if plans could not read the measured attention rates.

    Plans read rates by the number of keys per query, of the back end that training would choose.
    """
    from sppo.kernels.attention.choice import chosen_name

    if not grid.for_plans:
        queries = ",".join(map(format_tokens, grid.queries))
        raise ValueError(
            f"-o: a plan reads attention by keys per query, which must be the same for all of "
            f"queries={queries}; leave out keys, ask for one number of queries, or leave out -o"
        )
    if grid.backends is None:
        return
    for spans in grid.problems(dtypes):
        taken = chosen_name("auto", spans[0].case(device))
        if taken not in grid.backends:
            raise ValueError(
                f"-o: a plan reads the rates of {taken}, which training takes for {spans[0].dtype} "
                f"and heads of {spans[0].head_size}; add it to backend, or leave out -o"
            )
