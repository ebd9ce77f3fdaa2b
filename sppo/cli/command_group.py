"""Typer commands and command groups with plainer help texts.

Typer's own help shows <bool> after a flag, as if the flag took a value, shows <list[str]> after an
argument whose name already says what it is, and puts braces around required arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from sppo.config.base import Section


class CommandGroup(typer.Typer):
    """Command with subcommands.

    Args:
        cls: Class of the group in the command line.
        settings: Further arguments of :class:`typer.Typer`.
    """

    def __init__(
        self, *, cls: type[TyperGroup] | None = None, add_completion: bool = False, **settings: Any
    ) -> None:
        super().__init__(
            cls=cls or Group,
            no_args_is_help=True,
            rich_markup_mode="markdown",
            add_completion=add_completion,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Return a decorator that registers a function as a subcommand."""
        return super().command(name, **{"cls": Command, **settings})


class Group(TyperGroup):
    """Command group whose help is without types of flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        return _without_types(super().get_params(ctx))


class Command(TyperCommand):
    """Command whose errors say how keys are written.

    Attributes:
        keys: Section of the ``KEY=VALUE`` arguments, whose keys are listed below the help; None
            without such arguments.
    """

    keys: ClassVar[type[Section] | None] = None

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an error about an option that is a key says how it is written."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            self._explain(error)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line; optional arguments are in brackets."""
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        names = [(str(p.metavar or p.name.upper()), p.required) for p in arguments]
        brackets = (n if needed or n.startswith("[") else f"[{n}]" for n, needed in names)
        return [*brackets, str(self.options_metavar)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the keys."""
        super().format_help(ctx, formatter)
        if self.keys is not None:
            from sppo.cli.printing import table  # tables take long to import

            console = Console()
            console.print("Keys", style="bold")
            console.print(table(("key", "default", "meaning"), key_rows(self.keys), left=3))

    def _explain(self, error: Any) -> None:
        """Word an error as problems of a run are; say how a key that was an option is written."""
        from sppo.config.other_names import words_about
        from sppo.config.problems import KEY_PATHS

        message = getattr(error, "message", "").removeprefix("Value error, ")
        if message:
            error.message = message.replace("Input should be", "must be", 1)
        key = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
        paths, elsewhere = KEY_PATHS.get(key.rpartition(".")[2]), words_about(key)
        replaces = any("SECTION.KEY=VALUE" in str(param.metavar) for param in self.params)
        if self.keys is not None and key in self.keys.model_fields:
            error.message += f"; a key is written {key}=VALUE"
        elif paths and replaces:
            written = " or ".join(f"{path}=VALUE" for path in paths)
            error.message += f"; a value of the run file is replaced by {written}"
        elif elsewhere and replaces:
            error.message += f"; values of the run file are replaced by KEY=VALUE. {elsewhere}"
        else:
            return
        error.possibilities = None


def key_command(section: type[Section]) -> type[Command]:
    """Return the class of a command whose ``KEY=VALUE`` arguments have the keys of `section`."""
    return type("KeyCommand", (Command,), {"keys": section})


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


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the types of flags and arguments from the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
    return parameters
