"""Shape options of ``sppo bench``: lists on the command line become grids of shapes to time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sppo.quoting import quoted
from sppo.units import format_tokens, parse_size

if TYPE_CHECKING:
    from sppo.bench.attention_grid import AttentionGrid, Heads
    from sppo.bench.suite import Grids
    from sppo.kernels.attention.choice import BackendName

_T = TypeVar("_T")
_GEMM_FIELDS = ("tokens", "width")
"""Fields of :class:`ShapeOptions` that apply to matrix products; the others apply to attention."""


def _option(text: str) -> Any:
    return typer.Option(metavar="LIST", help=text, show_default=False)


Queries = Annotated[
    str | None, _option("attention: queries of a span, such as 4Ki,16Ki; keys follow, up to 8x.")
]
Keys = Annotated[
    str | None, _option("attention: keys the queries are the last of, such as 32Ki,64Ki.")
]
HeadCounts = Annotated[
    str | None, _option("attention: query/key-value heads, such as 32/8,32; plans take the first.")
]
HeadSizes = Annotated[str | None, _option("attention: sizes of a head, such as 64,128.")]
Backends = Annotated[
    str | None, _option("attention: back ends, such as triton,torch_blocks; else all that can.")
]
Tokens = Annotated[str | None, _option("gemm: rows of the input, such as 2Ki,8Ki.")]
Widths = Annotated[str | None, _option("gemm: of the input and the output, such as 4Ki,8Ki.")]


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Shape options as text from the command line; None for an option that was not given."""

    queries: str | None = None
    keys: str | None = None
    heads: str | None = None
    head_size: str | None = None
    backend: str | None = None
    tokens: str | None = None
    width: str | None = None

    def check_subjects(self, subject: str, parts: Sequence[str]) -> None:
        """Raise ValueError if an option was given that no measured subject uses.

        Args:
            subject: Subject named on the command line.
            parts: Single subjects to measure.

        Raises:
            ValueError: An option belongs to a subject that is not measured.
        """
        for field, text in asdict(self).items():
            user = "gemm" if field in _GEMM_FIELDS else "attention"
            if text is not None and user not in parts:
                raise ValueError(
                    f"--{field.replace('_', '-')} {quoted(text)}: only sppo bench {user} and all "
                    f"use it; leave it out of sppo bench {subject}"
                )


def asked_grids(
    options: ShapeOptions, *, device: str, dtypes: Sequence[str], quick: bool, for_plans: bool
) -> Grids:
    """Return the default grids with the axes replaced that the command line gives.

    Args:
        options: Shape options of the command line.
        device: "cpu" or "cuda".
        dtypes: Precisions to time, of bf16 and fp32.
        quick: Use few shapes on axes that the command line does not give.
        for_plans: Whether the rates go into a hardware description.

    Raises:
        ValueError: A bad value, shapes that contradict each other or that plans cannot read, or a
            back end that can run none of the shapes.
    """
    from sppo.bench.suite import default_grids

    grids = default_grids(device, quick=quick)
    tokens, widths = _sizes("--tokens", options.tokens), _sizes("--width", options.width)
    gemm = replace(
        grids.gemm,
        tokens=tokens or grids.gemm.tokens,
        widths=widths or grids.gemm.widths,
        fixed=bool(tokens or widths),
    )
    attention = _attention_grid(options, grids.attention)
    _check_keys(attention)
    _check_backends(attention, device=device, dtypes=dtypes)
    if for_plans:
        _check_for_plans(attention, device=device, dtypes=dtypes)
    return replace(grids, gemm=gemm, attention=attention)


def _attention_grid(options: ShapeOptions, default: AttentionGrid) -> AttentionGrid:
    queries, keys = _sizes("--queries", options.queries), _sizes("--keys", options.keys)
    sizes = _sizes("--head-size", options.head_size)
    heads = _each("--heads", options.heads, _heads)
    backends = _each("--backend", options.backend, _backend)
    return replace(
        default,
        queries=queries or default.queries,
        keys=keys or None,
        heads=heads or default.heads,
        head_sizes=sizes or default.head_sizes,
        backends=backends or None,
        fixed=bool(queries or keys or heads or sizes or backends),
    )


def list_text(text: str) -> tuple[str, ...]:
    """Return the comma-separated entries of `text`, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _each(option: str, text: str | None, read: Callable[[str], _T]) -> tuple[_T, ...]:
    """Return the parsed entries of a comma-separated list, each once; empty if `text` is None.

    Raises:
        ValueError: The list has no entry, or an entry cannot be parsed.
    """
    if text is None:
        return ()
    entries = list_text(text)
    if not entries:
        raise ValueError(f"{option} {quoted(text)}: names nothing; separate values by commas")
    try:
        return tuple(dict.fromkeys(map(read, entries)))
    except ValueError as error:
        raise ValueError(f"{option} {quoted(text)}: {error}") from None


def _sizes(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list, each at least 1, in ascending order."""
    return tuple(sorted(_each(option, text, _size)))


def _size(word: str) -> int:
    size = parse_size(word)
    if size < 1:
        raise ValueError(f"{word} is too small; write a number from 1 on")
    return size


def _heads(word: str) -> Heads:
    """Return the head counts in ``32/8`` (query/key-value heads), or ``32`` for as many of both."""
    from sppo.bench.attention_grid import Heads

    parts = word.split("/")
    if len(parts) > 2:
        raise ValueError(f"{word} has more than one /; write 32/8 or 32")
    heads = Heads(_size(parts[0]), _size(parts[-1]))
    if heads.queries % heads.kv:
        raise ValueError(
            f"{heads.queries} query heads cannot share {heads.kv} key-value heads evenly; write "
            "N/K with K dividing N, such as 32/8, or N alone"
        )
    return heads


def _backend(word: str) -> BackendName:
    from sppo.bench.attention_backends import BACKENDS
    from sppo.config.problems import nearest

    for name in BACKENDS:
        if word == name:
            return name
    raise ValueError(f"{word} is not one of {', '.join(BACKENDS)}.{nearest(word, BACKENDS)}")


def _check_keys(grid: AttentionGrid) -> None:
    """Raise ValueError if there are fewer keys than queries, which are the last of their keys."""
    if grid.keys is not None and grid.keys[0] < grid.queries[-1]:
        keys, queries = format_tokens(grid.keys[0]), format_tokens(grid.queries[-1])
        raise ValueError(
            f"--keys {keys}: fewer than {queries} queries, which are the last of them; ask for "
            f"--keys from {queries} on, or for --queries up to {keys}"
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
                f"--backend {name}: {reason}; ask for others, or leave --backend out to time all "
                "that can run here"
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
            f"--queries {queries}; leave out --keys, ask for one number of queries, or leave out -o"
        )
    if grid.backends is None:
        return
    for spans in grid.problems(dtypes):
        taken = chosen_name("auto", spans[0].case(device))
        if taken not in grid.backends:
            raise ValueError(
                f"-o: a plan reads the rates of {taken}, which training takes for {spans[0].dtype} "
                f"and heads of {spans[0].head_size}; add it to --backend, or leave out -o"
            )
