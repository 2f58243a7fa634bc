"""Compiles functions with numba, and caches the machine code on disk under a key of all that it depends on.

numba itself looks at the file of the outermost function only, and at when it was written: it would go on running an old
`gpuprof.rules.routing` after that has changed, and keeps code that was loaded before a file changed as if it were the
new file's. It also keeps the code of each copy of a file apart, and compiles in every process that finds nothing; here
all copies of the same source share their code, and of processes that begin together one compiles for all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numba
from numba.core.compiler_lock import global_compiler_lock

Function = TypeVar("Function", bound=Callable[..., Any])

#: So long another process is waited for that compiles the same; one that was stopped must not stop all others.
_PATIENCE_S = 120.0
_POLL_S = 0.02
#: Directories whose lock this process holds: a function that calls itself is compiled within its own compilation.
_locked: set[Path] = set()


def compile_function(function: Function, **options: Any) -> Function:
    """Return a function compiled by numba with these options, loaded from where it is kept if it is.

    What it calls of other modules must be there already; what it calls of its own may be defined further down.
    """
    config: Any = numba.config
    directory = code_directory(function)
    # numba reads the directory once, when it is told to cache, so that it can be set for one function alone.
    before, config.CACHE_DIR = config.CACHE_DIR, str(directory)
    compiled: Any
    try:
        compiled = numba.njit(cache=True, **options)(function)
        if hasattr(compiled, "_cache"):  # else numba is told not to compile
            _share_among_copies(compiled, directory)
            _cache_if_possible(compiled)
            _compile_in_one_process(compiled, directory)
    except RuntimeError:  # no place for a cache: compile in each process
        compiled = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = before
    return cast(Function, compiled)


def _share_among_copies(compiled: Any, directory: Path) -> None:
    """Have machine code looked for by what the directory's name says alone: not by the path of the file beside it."""
    cache = compiled._cache
    cache._cache_path = str(directory)
    cache._cache_file = type(cache._cache_file)(
        cache_path=str(directory), filename_base=cache._impl.filename_base, source_stamp=""
    )


def _compile_in_one_process(compiled: Any, directory: Path) -> None:
    """Let a process without cached machine code wait for another that is compiling it, and load its result."""
    compile_here = compiled.compile

    def compile_once(signature: Any) -> Any:
        # In this order: else a thread that holds the file could wait for one that compiles what calls the function.
        with global_compiler_lock:
            cache = compiled._cache
            if cache._index_key(signature, compiled.targetctx.codegen()) in cache._cache_file._load_index():
                return compile_here(signature)
            with _lock_directory(directory):
                return compile_here(signature)

    compiled.compile = compile_once


@contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory against other processes, as far as its file system has locks."""
    if directory in _locked:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("w")
    except OSError:
        yield
        return
    with file:
        _wait_for_lock(file.fileno())
        _locked.add(directory)
        try:
            yield
        finally:
            _locked.discard(directory)
            # Not by closing alone: a process forked meanwhile has the file open, too.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _wait_for_lock(file: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:  # such as a network's file system without locks
            return
        else:
            return


def _cache_if_possible(compiled: Any) -> None:
    """Let a function run even if its machine code cannot be cached.

    numba now and then has no object code to write of what links code that another process kept meanwhile, and raises
    RuntimeError then, after it has compiled.
    """
    save = compiled._cache.save_overload

    def try_to_save(signature: object, result: object) -> None:
        with suppress(RuntimeError):
            save(signature, result)

    compiled._cache.save_overload = try_to_save


def is_machine_code_cached(compiled: Callable[..., Any]) -> bool:
    """Return whether machine code of a compiled function, as it was loaded, is on disk."""
    cache = getattr(compiled, "_cache", None)
    index = getattr(cache, "_cache_file", None)
    return index is not None and bool(index._load_index())


def code_directory(function: Callable[..., Any]) -> Path:
    """Return where to keep the machine code of a function: by its code, and for what is not defined yet by its file.

    What the file defines further down calls what it has imported by now, which so counts as well.
    """
    file = Path(function.__code__.co_filename)
    source = file.read_bytes() if file.is_file() else b""
    code = f"{describe_code(function)} {_describe_imports(function, source)}"
    digest = hashlib.sha256(f"{numba.__version__} {code}".encode() + source)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpuprof" / f"code-{digest.hexdigest()[:20]}"


def describe_code(function: Callable[..., Any]) -> str:
    """Return all that the machine code of a function depends on, as it was loaded, whatever its file says by now.

    That is parameters, bytecode, names, literals and constants, the fields of named tuples that it is given, and the
    same of all that it calls.
    """
    found: dict[str, str] = {}
    _describe(function, found)
    return repr(sorted(found.items()))


def _describe_imports(function: Callable[..., Any], source: bytes) -> str:
    """Return what stands for all that compiled code of the function's file may use of what is there by now."""
    found: dict[str, str] = {}
    there = {name: function.__globals__[name] for name in _names_in(source) & function.__globals__.keys()}
    usable = {name: value for name, value in there.items() if hasattr(value, "py_func") or _is_constant(value)}
    values = [(name, _describe_value(value, set(), found)) for name, value in sorted(usable.items())]
    return repr((values, sorted(found.items())))


@lru_cache(maxsize=64)
def _names_in(source: bytes) -> frozenset[str]:
    return frozenset(_names(compile(source, "", "exec")))


def _is_constant(value: object) -> bool:
    return isinstance(value, int | float | str | tuple) or hasattr(value, "_fields")


def _describe(function: Callable[..., Any], described: dict[str, str]) -> None:
    plain = getattr(function, "py_func", function)
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in described:
        return
    # Before its calls are followed: functions may call each other in a circle.
    described[name] = ""
    code, used = plain.__code__, []
    for one in sorted(_names(code)):
        if one in plain.__globals__:
            used.append((one, _describe_value(plain.__globals__[one], _names(code), described)))
    # numba knows a field of a tuple by its place, and tuples by their name: two fields that change places are unseen.
    given = _describe_annotations(plain.__annotations__.values(), plain.__globals__, described)
    described[name] = repr((_code_key(code), used, given))


def _describe_annotations(
    annotations: Iterable[object], names: Mapping[str, Any], described: dict[str, str]
) -> list[str]:
    """Return what stands for the named tuples among annotations, which are types or name them."""
    found: list[str] = []
    for one in annotations:
        named = [names.get(word) for word in re.findall(r"\w+", str(one))]
        found += [_describe_value(each, set(), described) for each in (one, *named) if hasattr(each, "_fields")]
    return sorted(found)


def _describe_value(value: Any, names: set[str], described: dict[str, str]) -> str:
    """Return what stands for a global; functions go to ``described``, and those of modules that are named."""
    plain = getattr(value, "py_func", value)
    if isinstance(plain, FunctionType):
        _describe(plain, described)
        return f"{plain.__module__}.{plain.__qualname__}"
    if isinstance(value, ModuleType):
        inside = sorted(name for name in names if hasattr(value, name)) if value.__name__.startswith("gpuprof") else []
        return f"{value.__name__} {[_describe_value(getattr(value, name), set(), described) for name in inside]}"
    if isinstance(value, type):
        name = f"{value.__module__}.{value.__qualname__}"
        if hasattr(value, "_fields") and name not in described:
            described[name] = ""
            inner = _describe_annotations(
                value.__annotations__.values(), vars(sys.modules[value.__module__]), described
            )
            described[name] = repr((value._fields, inner))
        return name
    said = repr(value)
    # An address differs in every process, and nothing would ever be found again.
    return type(value).__name__ if " at 0x" in said else said


def _names(code: CodeType) -> set[str]:
    inside = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inside))


def _code_key(code: CodeType) -> tuple[object, ...]:
    consts = tuple(_code_key(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts)
    return code.co_varnames, code.co_argcount, code.co_code.hex(), consts, code.co_names
