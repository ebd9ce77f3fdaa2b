"""Typer commands and command groups with plainer help texts.

Typer's own help shows <bool> after a flag, as if the flag took a value, shows <list[str]> after an
argument whose name already says what it is, and puts braces around required arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import typer
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
        return super().command(name, **{"cls": _Command, **settings})


def usage_name(argument: Any) -> str:
    """Return the name of an argument for the usage line, in brackets if it is optional."""
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required or name.startswith("[") else f"[{name}]"


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if any("SECTION.KEY=VALUE" in str(p.metavar) for p in self.params):
                _explain_run_key(error)
            _word_plainly(error)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        return [*map(usage_name, arguments), str(self.options_metavar)]


class KeyCommand(_Command):
    """Command with ``KEY=VALUE`` arguments; the keys are listed below its help.

    Attributes:
        keys: Section of the keys.
    """

    keys: ClassVar[type[Section]]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an error about an option that is a key says how it is written."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _explain_request_key(error, self.keys)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the keys."""
        from sppo.cli.output.key_table import print_keys

        super().format_help(ctx, formatter)
        print_keys(self.keys)


class Group(TyperGroup):
    """Command group whose help is without types of flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        return _without_types(super().get_params(ctx))


def _word_plainly(error: Any) -> None:
    """Word what pydantic says about a value of an option or argument as problems of a run are."""
    message = getattr(error, "message", "").removeprefix("Value error, ")
    if message:
        error.message = message.replace("Input should be", "must be", 1)


def _explain_run_key(error: Any) -> None:
    """Extend the error about an unknown option that is a run-file key by how the key is written."""
    from sppo.config.problems import KEY_PATHS

    option = getattr(error, "option_name", "")
    paths = KEY_PATHS.get(option.lstrip("-").rpartition(".")[2].replace("-", "_"))
    if paths:
        written = " or ".join(f"{path}=VALUE" for path in paths)
        error.message += f"; a value of the run file is replaced by {written}"
        error.possibilities = None


def _explain_request_key(error: Any, section: type[Section]) -> None:
    """Extend the error about an unknown option that is a key of `section`."""
    key = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    if key in section.model_fields:
        error.message += f"; a key is written {key}=VALUE"
        error.possibilities = None


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the types of flags and arguments from the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = _no_type
    return parameters


def _no_type(ctx: Any) -> None:
    """Return nothing as the type that typer shows in the help."""
