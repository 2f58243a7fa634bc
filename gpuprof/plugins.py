"""Finds a plug-in by name: built in, installed under an entry point, or ``pkg.module:Class``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuprof.errors import InputError, PluginError, unknown_name


def load_plugin(kind: str, name: str, builtin: Mapping[str, str]) -> Any:
    """Return the class or function called ``name``.

    ``kind``: ``"collector"``, ``"estimator"`` or ``"policy"``; entry points are looked up under ``gpuprof.<kind>s``;
    ``name``: a key of ``builtin``, the name of an entry point, or ``"package.module:Class"``; ``builtin``: name →
    ``"package.module:Class"``; modules are imported on demand.

    Raises `InputError` when the name is unknown, or its object cannot be imported.
    """
    target = builtin.get(name)
    if target is None and ":" in name:
        target = name
    if target is not None:
        return _import(kind, target)
    group = {entry.name: entry for entry in entry_points(group=f"gpuprof.{_plural(kind)}")}
    if name not in group:
        raise unknown_name(kind, name, sorted({*builtin, *group}))
    return _import(kind, group[name].value)


def identify(plugin: object) -> str:
    """Return the name of a plug-in given by name or as an object, whose name is ``"package.module:Class"``."""
    return plugin if isinstance(plugin, str) else f"{type(plugin).__module__}:{type(plugin).__qualname__}"


def hash_source(plugin: object) -> str:
    """Return a hash of the file that defines a plug-in, given as ``"package.module:Class"`` or as an object.

    Empty for other names, and where there is no file.
    """
    name, file = identify(plugin), None
    if ":" in name:
        with suppress(Exception):  # whoever uses the plug-in reports why it cannot be imported
            file = _import_module(name.partition(":")[0]).__file__
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def require_importable(kind: str, name: str) -> None:
    """Check that a plug-in that a file names is installed: a file must not make gpuprof run modules of its folder.

    Raises `InputError` when the module of ``"package.module:Class"`` is neither imported nor on the search path.
    """
    module = name.partition(":")[0]
    with suppress(Exception):  # the search imports the parents of a module, which may raise anything
        if ":" not in name or module in sys.modules or importlib.util.find_spec(module) is not None:
            return
    raise InputError(f"the {kind} {name!r} is not installed here", f"give it by --{kind} {name} in its folder")


def require_methods(kind: str, name: str, instance: object, *methods: str) -> None:
    """Check that a plug-in has the methods of its kind.

    Raises `InputError` when a method is missing, as in an importable object of another kind.
    """
    for method in methods:
        if not callable(getattr(instance, method, None)):
            raise InputError(f"{name!r} is no {kind}: it has no {method}()", _name_form(kind))


def _name_form(kind: str) -> str:
    article = "an" if kind.startswith("e") else "a"
    return f"name {article} {kind} as package.module:Class, of a module in the current folder or in PYTHONPATH"


def describe_error(error: BaseException) -> str:
    """Return a plug-in's error in one line, with its type unless it is an `ImportError`."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError) else f"{type(error).__name__}: {text}".rstrip(": ")


def describe_failure(kind: str, name: str, plugin: object, error: Exception) -> PluginError:
    """Return the error of a plug-in that raised an exception: its name, and the line in its own file."""
    file = getattr(sys.modules.get(plugin.__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    location = f" in line {lines[-1]} of {Path(file).name}" if file and lines else ""
    return PluginError(f"the {kind} {name!r} failed{location}: {describe_error(error)}", "--debug shows where")


def plugin_names(kind: str, builtin: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of all plug-ins of this kind, built in and installed, sorted."""
    return tuple(sorted({*builtin, *(entry.name for entry in entry_points(group=f"gpuprof.{_plural(kind)}"))}))


def _plural(kind: str) -> str:
    return "policies" if kind == "policy" else f"{kind}s"


def _import_module(name: str) -> ModuleType:
    if not name.startswith("gpuprof.") and (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # the last, so that its files shadow no module
    return importlib.import_module(name)


def _import(kind: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = _import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of others may raise anything
        message = describe_error(error)
        raise InputError(f"cannot import the {kind} {target!r}: {message}", _name_form(kind)) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        message = f"cannot find the {kind} {target!r}: the module {module_name!r} has no class {attribute!r}"
        raise InputError(message, _name_form(kind)) from None
