"""The control socket of a running server, accessible only to its user."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gpuprof.errors import GpuprofError, InputError, UnavailableError

Apply = Callable[[Path], Awaitable[dict[str, Any]]]


def control_path(port: int) -> Path:
    """Return the socket of the server on ``port``, in a directory accessible only to this user."""
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"gpuprof-{os.getuid()}"
    # The directory guards the socket: every peer is trusted, and the temporary directory is world-writable.
    directory.mkdir(mode=0o700, exist_ok=True)
    # Another user may have created the directory first.
    if directory.stat().st_uid != os.getuid():
        raise UnavailableError(
            f"{directory} belongs to somebody else", "set XDG_RUNTIME_DIR to a directory of your own"
        )
    return directory / f"{port}.sock"


async def open_control(port: int, apply: Apply) -> asyncio.Server:
    """Listen for commands; ``apply`` receives the path of a new map and returns a description of the change.

    Raises `UnavailableError` when the socket cannot be made.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            command = json.loads(await reader.readline())
            answer = await apply(Path(command["apply"]))
        except GpuprofError as error:
            answer = {"error": error.message, "fix": error.fix, "input": isinstance(error, InputError)}
        except (ValueError, KeyError, TypeError):
            answer = {"error": "the command makes no sense", "fix": "", "input": True}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    path = control_path(port)
    path.unlink(missing_ok=True)
    try:
        return await asyncio.start_unix_server(serve, path)
    except OSError as error:
        raise UnavailableError(f"cannot open {path}: {error.strerror or error}") from None


def send_apply(port: int, path: Path) -> dict[str, Any]:
    """Send the server on ``port`` the command to move to the map at ``path``; return the description of the change.

    Raises `UnavailableError` when no server of this user listens there, or the server lacks resources of the map;
    `InputError` when the server refuses the map.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(control_path(port)))
            connection.sendall(json.dumps({"apply": str(path.absolute())}).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
        except OSError:
            raise UnavailableError(
                f"no server of yours listens on port {port}", "start one with gpuprof serve"
            ) from None
    answer: dict[str, Any] = json.loads(line) if line else {"error": "the server ended meanwhile"}
    if "error" in answer:
        kind = InputError if answer.get("input") else UnavailableError
        raise kind(answer["error"], answer.get("fix", ""))
    return answer
