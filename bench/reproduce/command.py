"""Runs a reproduction as a command: reads its options, prints what came out, draws it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.reproduce.reproduction import Reproduction, text_table
from gpuprof.errors import GpuprofError, InputError
from gpuprof.reporting.picture import write_picture

#: Where the authors' published measurements are looked for; see ``--help`` of the commands that need them.
REFERENCE = Path("../shared/reference")


def run(about: str | None, compute: Callable[[Path], Reproduction], arguments: Sequence[str] | None = None) -> int:
    """Compute and print; return 0, or 1 when a map failed the independent check.

    Parameters
    ----------
    about : str or None
        The docstring of the command.
    compute : callable
        Directory of the published measurements → what came out.
    arguments : sequence of str, optional
        Of the command; those that the program was started with where not given.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="directory of published measurements")
    parser.add_argument("--plot", type=Path, help="draw into this .svg or .png file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    try:
        started = time.perf_counter()
        outcome = compute(options.reference)
        seconds = time.perf_counter() - started
        if options.plot is not None:
            draw(outcome, options.plot)
    except GpuprofError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(asdict(outcome), indent=1))
    else:
        show(outcome)
        print(f"\n{seconds:.1f} s", file=sys.stderr)
    return 0 if outcome.sound else 1


def draw(outcome: Reproduction, path: Path) -> None:
    """Write the picture, or where there are several FILE-1, FILE-2 …; raises what `write_picture` raises."""
    for number, chart in enumerate(outcome.charts, start=1):
        one = path if len(outcome.charts) == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        write_picture(chart, one)


def show(outcome: Reproduction) -> None:
    """Print the table, the paper's numbers beside ours, and what differs and why."""
    print(f"{outcome.title}\n\n{text_table(outcome.header, outcome.rows)}\n")
    if outcome.facts:
        header = ("the paper says", "where", "printed", "here", "")
        print(text_table(header, [fact.row() for fact in outcome.facts]) + "\n")
    for difference in outcome.differences:
        print(f"* {difference}")
    if outcome.commands:
        print("\nWhat was run:")
    for line in outcome.commands:
        print(f"  {line}")
    if not outcome.sound:
        print("\nNOT SOUND: a map failed the independent check")


def find_published(directory: Path, name: str, source: str) -> Path:
    """Return the file or folder of published measurements called ``name``.

    Raises
    ------
    InputError
        When it is not there; with where to get it.
    """
    found = directory / name
    if not found.exists():
        raise InputError(f"{found} is not there: its authors publish it", f"copy {source} there, or give --reference")
    return found
