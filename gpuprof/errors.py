"""Errors that a user can cause or fix, and the exit code of each.

    GpuprofError              1   cannot be done
    ├── InputError            3   a file, option or name that is wrong
    ├── PluginError           3   a policy or estimator of others that fails
    ├── UnstableError         2   a result that cannot be trusted (noisy machine)
    ├── InfeasibleError       1   no placement meets the demands
    ├── SloMissedError        1   a model missed its objective under load
    └── UnavailableError      1   a tool, device or permission that this machine lacks

A message names the rule, the value that broke it and, in ``fix``, what to do. Anything else that escapes
is a bug: exit code 99.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

BUG_EXIT_CODE = 99

#: Name in the package index: `gpuprof` there belongs to another project. Command and import keep the name gpuprof.
DISTRIBUTION = "gpuprof-onnx"


def install_hint(extra: str) -> str:
    """Return the command that installs gpuprof with an extra, such as ``"serve"`` or ``"cpu,serve"``."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class GpuprofError(Exception):
    """An expected failure.

    Parameters
    ----------
    message : str
        The rule and the value that broke it, one line.
    fix : str
        What the user can do about it, one line; empty when there is nothing to do.
    """

    exit_code = 1

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


class InputError(GpuprofError):
    """A wrong file, option or name from the user."""

    exit_code = 3


class PluginError(GpuprofError):
    """A defect in a plug-in named by the user."""

    exit_code = InputError.exit_code


@contextmanager
def refuse_unwritable(path: str | os.PathLike[str], fix: str = "") -> Iterator[None]:
    """Turn the system's errors on writing ``path`` into `InputError`.

    Raises
    ------
    InputError
        For an `OSError` in the block.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror or error}", fix) from error


class UnstableError(GpuprofError):
    """The result was obtained but cannot be trusted."""

    exit_code = 2


class InfeasibleError(GpuprofError):
    """The request cannot be met by any placement."""


class SloMissedError(GpuprofError):
    """A model did not keep its service-level objective under measured or simulated load."""


class UnavailableError(GpuprofError):
    """This machine lacks a tool, a device or a permission."""


#: Most characters of another program's message repeated in an error.
LONGEST_DETAIL = 300


def shorten_message(message: object) -> str:
    """Return another program's message on a single line, its end cut off if it is long."""
    text = " ".join(str(message).split())
    return text if len(text) <= LONGEST_DETAIL else text[: LONGEST_DETAIL - 1] + "…"


def unknown_name(kind: str, name: str, names: list[str]) -> InputError:
    """Return the error for an unknown name, with the nearest known names."""
    import difflib

    lower, names = name.lower(), list(dict.fromkeys(names))
    matches = [candidate for candidate in names if lower and candidate.lower().startswith(lower)][:3]
    matches = matches or difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    fix = f"did you mean {' or '.join(matches)}?" if matches else f"known: {', '.join(sorted(names)) or 'none'}"
    return InputError(f"unknown {kind} {name!r}", fix)


def runtime_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a runtime for a model that cannot be loaded or run."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError:
        return (InputError, RuntimeError, ValueError)
    classes = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*classes, InputError, RuntimeError, ValueError)
