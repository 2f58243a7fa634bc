"""Behaviour of all commands: help with options under the heading of their group, and no option given twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from gpuprof.errors import InputError

_ARGUMENTS, _OTHER = "Arguments", "Other options"
#: Longer names stand on a line of their own.
_NAME_COLUMNS = 30

_Sections = dict[str, list[tuple[str, str]]]


class VerbCommand(TyperCommand):
    """A command that refuses a repeated option of a single value.

    Its help lists options by their ``rich_help_panel``, as plain text, those without a panel last.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; of several values click would take the last without a word."""
        if args and not ctx.resilient_parsing:
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            for option, count in Counter(filter(_takes_one_value, given)).items():
                if count > 1:
                    name = max(option.opts, key=len)
                    raise InputError(f"{name} is given {count} times and takes one value", f"give {name} once")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each section, with the options' descriptions at the same column in all of them."""
        if not any(_heading(parameter) for parameter in self.get_params(ctx)):
            super().format_options(ctx, formatter)
            return
        sections = self._sections(ctx)
        width = min(_NAME_COLUMNS, max(len(name) for entries in sections.values() for name, _ in entries))
        for heading, entries in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), said) for name, said in entries], col_max=_NAME_COLUMNS)

    def _sections(self, ctx: Any) -> _Sections:
        arguments: list[tuple[str, str]] = []
        others: list[tuple[str, str]] = []
        groups: _Sections = {}
        for parameter in self.get_params(ctx):
            if (entry := parameter.get_help_record(ctx)) is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(entry)
            elif heading := _heading(parameter):
                groups.setdefault(heading, []).append(entry)
            else:
                others.append(entry)
        sections = {_ARGUMENTS: arguments, **groups, _OTHER: others}
        return {heading: entries for heading, entries in sections.items() if entries}


def _takes_one_value(parameter: Any) -> bool:
    """Return whether a parameter is an option whose second value would replace the first; flags are not."""
    return parameter.param_type_name == "option" and not parameter.multiple and not parameter.is_flag


def _heading(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)
