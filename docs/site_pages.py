"""Inserts text from the sources when the site is built: policies, metrics, glossary, public names, commands.

Markers such as ``<!-- policies -->`` in a page are replaced by the text.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with its markers filled in; mkdocs calls it for each page."""
    writers: dict[str, Callable[[], str]] = {
        "policies": list_policies,
        "metrics": list_metrics,
        "glossary": read_glossary,
        "reference": list_public_names,
        "commands": list_commands,
    }
    for name, write in writers.items():
        if (marker := f"<!-- {name} -->") in markdown:
            markdown = markdown.replace(marker, write())
    return markdown


def list_policies() -> str:
    """Return a table of the policies that are built in, with their options."""
    from gpuprof.placement.policies import BUILTIN, make_policy

    lines = ["| policy | method | options |", "|---|---|---|"]
    for name in BUILTIN:
        policy = make_policy(name)
        options: tuple[Field[Any], ...] = fields(policy) if is_dataclass(policy) else ()
        told = ", ".join(f"`{one.name}={one.default}`" for one in options if one.init and one.default is not MISSING)
        lines.append(f"| `{name}` | {_first_sentence(type(policy))} | {told or '–'} |")
    return "\n".join(lines)


def list_metrics() -> str:
    """Return a table of the metrics of a server, from the names and descriptions in its source."""
    tree = ast.parse((ROOT / "gpuprof/serving/protocol/metrics.py").read_text(encoding="utf-8"))
    lines = ["| metric | type | meaning |", "|---|---|---|"]
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_FAMILIES":
            assert isinstance(node.value, ast.Dict)
            for metric, entry in zip(node.value.keys, node.value.values, strict=True):
                assert metric is not None and isinstance(entry, ast.Tuple)
                kind, text = ast.unparse(entry.elts[0]), ast.literal_eval(entry.elts[1])
                lines.append(f"| `{ast.literal_eval(metric)}` | {kind.removesuffix('MetricFamily').lower()} | {text} |")
    return "\n".join(lines)


def read_glossary() -> str:
    """Return the glossary of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    found = re.search(r"^## Glossary\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert found is not None, "ARCHITECTURE.md has no glossary"
    return found[1].strip()


def list_public_names() -> str:
    """Return mkdocstrings directives for every public name: functions first, then types."""
    import gpuprof

    public: dict[str, Any] = {name: getattr(gpuprof, name) for name in gpuprof.__all__ if name != "__version__"}
    functions = [name for name, one in public.items() if inspect.isfunction(one)]
    rest = [name for name in public if name not in functions]
    return "\n\n".join(f"::: {public[name].__module__}.{public[name].__qualname__}" for name in [*functions, *rest])


def list_commands() -> str:
    """Return a section for each command: its text, and a table of its arguments and options."""
    import typer

    from gpuprof.cli.main import build_app

    group: Any = typer.main.get_command(build_app())
    return "\n".join(line for name in group.commands for line in _describe_command(group.commands[name], name))


def _describe_command(command: Any, name: str) -> list[str]:
    lines = [f"## gpuprof {name}" if " " not in name else f"### gpuprof {name}", "", command.help or "", ""]
    for inner, subcommand in getattr(command, "commands", {}).items():
        lines += _describe_command(subcommand, f"{name} {inner}")
    parameters = [parameter for parameter in command.params if parameter.name != "help"]
    if not parameters or hasattr(command, "commands"):
        return lines
    lines += ["| option | meaning | default |", "|---|---|---|"]
    for parameter in parameters:
        shown = ", ".join(f"`{word}`" for word in [*parameter.opts, *parameter.secondary_opts])
        default = "" if parameter.default in (None, False) or callable(parameter.default) else f"`{parameter.default}`"
        lines.append(f"| {shown} | {(parameter.help or '').replace('|', chr(92) + '|')} | {default} |")
    return [*lines, ""]


def _first_sentence(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("|", "\\|")
