"""Entry point: assembles the verbs, and turns errors into one line on stderr and an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from gpuprof.cli.options import Verbs
from gpuprof.cli.output import say_note
from gpuprof.errors import BUG_EXIT_CODE, DISTRIBUTION, GpuprofError, InputError, UnavailableError, install_hint

#: Shells' exit code of a program that SIGINT ended: 128 and the signal's number.
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Verbs that read a file of demands.
_OF_DEMANDS = ("place", "compare")

#: Seconds within which a repeated signal is ignored: programs that signal a process group signal its leader, too
#: (timeout does).
_SAME_SIGNAL_S = 1.0

#: Verbs of the help's first screen with their descriptions. The module of a verb defines a function or a typer app of
#: the verb's name, or an ``app``. The list imports no such module.
FIRST_VERBS = {
    "doctor": "Print what this machine can do; nothing is changed.",
    "profile": "Measure models on this machine.",
    "estimate": "Predict latency, throughput and memory.",
    "place": "Decide which replicas run where, at the least cost.",
    "check": "Check a map; exit 1 when it breaks a rule.",
    "serve": "Serve the models of a map over HTTP and gRPC.",
    "load": "Send traffic to a server and measure its answers.",
    "compare": "Compare two databases, policies, or kinds of GPUs.",
    "export": "Write the files that another tool needs to run a map.",
    "run": "Run the steps of a file.",
}
#: Other verbs by their purpose.
MORE_VERBS = {
    "Maps": {
        "simulate": "Replay requests against a map in simulated time.",
        "explain": "Show the alternatives of a model's replicas.",
        "apply": "Move a running server to another map.",
    },
    "Traffic and results": {
        "trace": "Make and inspect request traces.",
        "report": "Write one HTML page with plots.",
        "db": "Look into the kernel database, check it, import and export.",
    },
    "Predictions": {
        "calibrate": "Fit the interference of workloads on a device.",
        "train": "Fit regressors to the measurements of a device.",
        "evaluate": "Compare predictions with measurements.",
        "lab": "Run scheduling experiments and the papers' figures.",
    },
    "Models": {
        "zoo": "Build standard networks as ONNX files, or change a batch.",
        "similarity": "Compare the weights of models layer by layer.",
        "merge": "Merge models that share weights into one graph.",
    },
}
VERBS = {**FIRST_VERBS, **{verb: text for verbs in MORE_VERBS.values() for verb, text in verbs.items()}}
#: Modules of several verbs.
_MODULES = {
    "export": "export report",
    "fitting": "calibrate train evaluate",
    "maps": "check explain",
    "models": "zoo similarity merge",
    "serving": "serve apply",
}


def _list_more_verbs() -> str:
    """Return the less frequent verbs, grouped by purpose, in lines that click does not rewrap."""
    lines = (f"  {purpose + ':':<22}{', '.join(verbs)}" for purpose, verbs in MORE_VERBS.items())
    return "\n".join(["\b", "More:", *lines])


def load_verb(verb: str) -> Any:
    """Return the function of a verb, or the typer app of its commands."""
    name = next((name for name, verbs in _MODULES.items() if verb in verbs.split()), verb)
    module = importlib.import_module(f"gpuprof.cli.{name}")
    return getattr(module, verb) if hasattr(module, verb) else module.app


def build_app(verbs: Iterable[str] = tuple(VERBS), names_only: bool = False) -> typer.Typer:
    """Return the typer app with these verbs, whose functions import heavy packages only when called.

    ``names_only``: list the verbs without importing their modules.
    """
    app = Verbs(
        name="gpuprof",
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Measure what ONNX models need from a GPU, predict it, pack many models onto few GPUs, and serve them.",
        epilog=_list_more_verbs(),
    )
    app.callback()(_root)
    for verb in verbs:
        if names_only:
            app.command(verb, short_help=VERBS[verb], hidden=verb not in FIRST_VERBS)(lambda: None)
            continue
        defined = load_verb(verb)
        if isinstance(defined, typer.Typer):
            app.add_typer(defined, name=verb, short_help=VERBS[verb])
        else:
            app.command(verb, short_help=VERBS[verb])(defined)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run gpuprof and return the exit code; `gpuprof.errors` lists the exit codes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get("GPUPROF_DEBUG"))
    try:
        code = run_line([word for word in words if word != "--debug"])
        sys.stdout.flush()  # detects a full disk while an error can still be reported
        return code
    except GpuprofError as error:
        if debug:
            raise
        for note in getattr(error, "__notes__", ()):  # notes of the lost result
            say_note(note)
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the reader has gone: nothing more is to be written
        return 0
    except MemoryError:
        if debug:
            raise
        return _fail("the memory of this machine does not suffice for what was asked", GpuprofError.exit_code)
    except Exception as error:  # top level: any other exception is a bug and is reported so
        # Typer carries its own copy of click from 0.26 on and uses the installed click before: errors are recognised
        # by name and attributes.
        if type(error).__name__ == "NoArgsIsHelpError":  # a command without arguments prints its help
            sys.stdout.write(f"{error.format_message()}\n")  # type: ignore[attr-defined]
            return 0
        if hasattr(error, "format_message"):
            return _fail(f"{error.format_message()} ({_remedy(error, words)})", InputError.exit_code)
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in _FULL:
            # The program's end would flush the buffer, and fail again.
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
            where = f" {error.filename}" if error.filename else ""
            return _fail(f"cannot write{where}: {error.strerror}", GpuprofError.exit_code)
        if isinstance(error, ModuleNotFoundError) and (extra := _extra_with(error.name or "")):
            return _fail(f"{error.name} is not installed ({install_hint(extra)})", UnavailableError.exit_code)
        return _fail(f"bug: {type(error).__name__}: {error} (run again with --debug and report it)", BUG_EXIT_CODE)


def _extra_with(module: str) -> str | None:
    """Return the extra of gpuprof that installs a module; None without such an extra."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        needed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    package = module.partition(".")[0].replace("_", "-").lower()
    extras = (re.fullmatch(rf"{re.escape(package)}\b[^a-z;]*;.*extra == .(\w+).", need.lower()) for need in needed)
    return next((extra[1] for extra in extras if extra), None)


def run_line(line: Sequence[str]) -> int:
    """Run a command line without ``gpuprof`` and return its exit code; errors are left to the caller."""
    words = list(line)
    verbs = [words[0]] if words and words[0] in VERBS else list(VERBS)  # a single verb starts faster than all verbs
    is_list = list(words) in (["-h"], ["--help"]) or (not words and "_GPUPROF_COMPLETE" not in os.environ)
    app = build_app(verbs, names_only=True) if is_list else build_app(verbs)
    try:
        with termination_as_interrupt():
            # Not standalone: click would print its own errors and end the process.
            result = typer.main.get_command(app)(words, prog_name="gpuprof", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        result = INTERRUPTED_EXIT_CODE
    if result == INTERRUPTED_EXIT_CODE:
        return _fail("interrupted", INTERRUPTED_EXIT_CODE)
    return result if isinstance(result, int) else 0


def console_script() -> None:
    """Run the ``gpuprof`` command; characters outside a terminal's encoding are printed as escapes."""
    _reserve_stdout()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, and SIGHUP unless ignored, as an interrupt.

    Raises `KeyboardInterrupt`: within the context, on such a signal.
    """
    # Python lets only the main thread set handlers. Only default handlers are replaced: nohup ignores SIGHUP, and a
    # test may have a handler of its own.
    is_main = threading.current_thread() is threading.main_thread()
    signals = [s for s in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(s) is signal.SIG_DFL]
    last_s = -_SAME_SIGNAL_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _SAME_SIGNAL_S:
            last_s = time.monotonic()
            raise KeyboardInterrupt

    for number in signals:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def _reserve_stdout() -> None:
    """Keep standard output for results: send file descriptor 1 to stderr and give ``sys.stdout`` a copy of it.

    Compiled libraries print to the descriptor, regardless of their options (HiGHS 1.16 its banner), and would corrupt
    ``--json`` output.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper) or not isinstance(sys.stderr, io.TextIOWrapper):
        return  # closed by the caller
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(sys.stderr.fileno(), 1)
    sys.stdout = open(results, "w", encoding=sys.stdout.encoding)  # noqa: PTH123, SIM115 - open until the end


def _print_version(is_set: bool) -> None:
    if is_set:
        from gpuprof import __version__

        sys.stdout.write(f"gpuprof {__version__}\n")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error; may stand anywhere on the line."
    ),
) -> None:
    pass  # all of them act before a verb is chosen


def _remedy(error: Any, words: Sequence[str]) -> str:
    """Return the fix for a command line that cannot be parsed."""
    verb = words[0] if words and words[0] in VERBS else ""
    demands = [word for word in words if word.endswith(".csv")]
    if verb in _OF_DEMANDS and demands and "unexpected extra" in error.format_message():
        return f"demands are given by --slo-file {demands[0]}"
    context = getattr(error, "ctx", None)
    return f"see {f'gpuprof {verb}'.rstrip() if context is None else context.command_path} --help"


def _fail(message: str, exit_code: int) -> int:
    say_note(" ".join(message.split()))
    return exit_code
