"""``gpuprof run``: run a whole plan from one file that can be committed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.errors import InputError


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="YAML file: models, devices and steps.")] = Path(
        "plan.yaml"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each step and run none.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run every step, those done before too.")] = False,
) -> None:
    """Run the steps of a file: profile, estimate, place, check, simulate, export, report and others.

    Steps that were done before are left out unless what they read or what they wrote has changed.
    """
    from gpuprof.cli.main import build_app
    from gpuprof.cli.plan_file import list_commands, read_plan
    from gpuprof.cli.plan_run import run_steps, show_line, write_csv

    plan, file = read_plan(plan_file)
    with _folder(plan_file.absolute().parent):  # relative paths start at the file's folder
        commands = list_commands(plan, file, typer.main.get_command(build_app()))
        if dry_run:
            if plan.models:
                sys.stdout.write(f"# {plan.folder / 'slo.csv'}:\n")
                sys.stdout.write("".join(f"#   {line}\n" for line in write_csv(plan.models).splitlines()))
            sys.stdout.write("".join(f"{show_line(command)}\n" for command in commands))
            return
        if code := run_steps(plan_file, plan, commands, fresh):
            raise typer.Exit(code)


def _folder(path: Path) -> contextlib.chdir[Path]:
    if not path.is_dir():
        raise InputError(f"{path} is no folder", "name the folder that the plan stands in")
    return contextlib.chdir(path)
