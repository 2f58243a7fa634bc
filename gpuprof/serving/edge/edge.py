"""Envoy in front of a server: its configuration, made of ``envoy.yaml``, and its process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from gpuprof.errors import GpuprofError, InputError, UnavailableError, install_hint
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.supervised_process import LivingProcess, SupervisedProcess

#: The oldest Envoy version that supports all settings of ``envoy.yaml``.
LEAST_VERSION = "1.36"
#: Time for which clients are asked to close connections before listeners close.
_DRAIN_S = 1
_LIBC = ctypes.CDLL(None)
#: A line of Envoy's statistics, of the listeners ``http`` and ``grpc``.
_ACTIVE = re.compile(r"^http\.(?:http|grpc)\.downstream_rq_active: (\d+)", re.MULTILINE)
_VERSION = re.compile(r"/(\d+)\.(\d+)\.\d+")


_PREFIX = "gpuprof-edge-"
_STARTING_S = 60.0  #: Age below which a folder may be that of a server that has not locked it yet.
_WHEN = "when"
_REMOVED = object()


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """The values of ``envoy.yaml``."""

    router_address: dict[str, Any]  #: Address of the router in Envoy's format: ``{"pipe": {"path": …}}``.
    host: str = "127.0.0.1"  #: Address to listen on.
    http_port: int | None = None
    grpc_port: int | None = None
    streams_socket: str | None = None  #: Socket of the gRPC stream server; None: no such server.
    admin_socket: str | None = None
    #: ``certificate``, ``private_key``: Paths of PEM files; None: no TLS.
    certificate: str | None = None
    private_key: str | None = None
    token: str = ""  #: Empty: no token is needed.
    max_body_bytes: int = 64 << 20
    max_connections: int = 16_384
    max_heap_bytes: int = 256 << 20
    stall_s: float = 30.0  #: Time without progress after which a client's connection counts as stalled.
    idle_s: float = 300.0  #: Time after which an idle connection is closed.

    def to_values(self) -> dict[str, Any]:
        """Return the settings by their names in the file."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        # A request has the stall limit, and the time of the largest body at 1 MB/s.
        request_s = self.stall_s + self.max_body_bytes / (1 << 20)
        return values | {
            "authorization": f"Bearer {self.token}",
            "authorization_in_lower_case": f"bearer {self.token}",
            "request_timeout": f"{request_s:.0f}s",
            "stall_timeout": f"{self.stall_s:.0f}s",
            "idle_timeout": f"{self.idle_s:.0f}s",
            # Several bodies of the largest size must fit.
            "max_heap_bytes": max(self.max_heap_bytes, 4 * self.max_body_bytes),
        }


def render_bootstrap(settings: EdgeSettings) -> str:
    """Return Envoy's configuration as YAML."""
    text = files("gpuprof.serving.edge").joinpath("envoy.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    del document["parts"]
    return yaml.dump(_fill(document, settings.to_values()), Dumper=_PlainDumper, sort_keys=False, width=120)


class _PlainDumper(yaml.SafeDumper):
    """Writes repeated parts in full, which Envoy and people read more easily than YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that no part is replaced by a YAML alias."""
        return True


def _fill(node: Any, values: dict[str, Any]) -> Any:
    """Return a part of the document with its settings filled in; `_REMOVED` if its condition is false."""
    if isinstance(node, dict):
        if _WHEN in node and not _fill(node[_WHEN], values):
            return _REMOVED
        filled = {key: _fill(value, values) for key, value in node.items() if key != _WHEN}
        return {key: value for key, value in filled.items() if value is not _REMOVED}
    if isinstance(node, list):
        return [value for item in node if (value := _fill(item, values)) is not _REMOVED]
    if isinstance(node, str) and node.startswith("$"):
        return values[node[1:]]
    return node


def find_envoy(path: Path | None = None) -> Path:
    """Return the Envoy binary: ``path``, the binary of the extra ``edge``, or the binary on the PATH.

    Raises `UnavailableError` where there is none, or its version is too old.
    """
    binary = path
    if binary is None:
        spec = importlib.util.find_spec("envoy")
        packaged = None if spec is None or spec.origin is None else Path(spec.origin).parent / "_bin" / "envoy"
        on_path = shutil.which("envoy")
        binary = packaged if packaged is not None and packaged.exists() else Path(on_path) if on_path else None
    if binary is None or not os.access(binary, os.X_OK):
        where = "is not installed" if path is None else f"is not an executable file at {path}"
        raise UnavailableError(
            f"gRPC, TLS and --public need Envoy, which {where}",
            f"{install_hint('edge')}, or --envoy PATH; without them HTTP alone is served",
        )
    try:
        process = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(f"{binary} does not run: {error}") from None
    match = _VERSION.search(process.stdout)
    if match is None or [*map(int, match.groups())] < [*map(int, LEAST_VERSION.split("."))]:
        raise UnavailableError(
            f"{binary} is not Envoy {LEAST_VERSION} or later: {process.stdout.strip() or process.stderr.strip()}"
        )
    return binary


class Edge:
    """Envoy in front of a server.

    Parameters
    ----------
    binary : Path
    host : str
        Address or name to listen on.
    http_port, grpc_port : int or None
        0: any free port; None: no such listener.

    Attributes
    ----------
    directory : Path
        Sockets and configuration, private to the user.
    http_port, grpc_port : int or None
        The actual ports, which are reserved as long as the edge exists.
    restarts : int
        Number of restarts after an unexpected end of Envoy.
    """

    def __init__(self, binary: Path, host: str, http_port: int | None, grpc_port: int | None) -> None:
        self._binary = binary
        self._reserved: list[socket.socket] = []
        self._host = ""
        try:
            self.http_port = self._reserve(host, http_port, "--port")
            self.grpc_port = self._reserve(host, grpc_port, "--grpc-port")
        except BaseException:
            self._release()
            raise
        remove_abandoned()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.directory = Path(self._folder.name)
        self._lock = _lock(self.directory)
        self._admin = self.directory / "admin"
        self._log = self.directory / "log"
        self._supervised: SupervisedProcess | None = None
        self.restarts = 0

    async def start(self, settings: EdgeSettings, certificate: str = "", private_key: str = "") -> None:
        """Start Envoy and wait until it listens; ``certificate``, ``private_key``: PEM.

        Raises `UnavailableError` when Envoy ends.
        """
        settings = replace(
            settings,
            host=self._host,
            http_port=self.http_port,
            grpc_port=self.grpc_port,
            admin_socket=str(self._admin),
            certificate=self._write("chain.pem", certificate) if certificate else None,
            private_key=self._write("key.pem", private_key) if certificate else None,
        )
        self._write("envoy.yaml", render_bootstrap(settings))
        envoy = await self._spawn()
        self._supervised = SupervisedProcess(self._spawn, self._log_exit, self._log_failure)
        try:
            await self._await_listening(envoy)
        finally:
            self._supervised.begin(envoy)

    async def drain(self) -> None:
        """Ask clients to close their connections, then stop listening; pending answers are still sent."""
        with contextlib.suppress(OSError):
            await self._ask_admin("POST", "/drain_listeners?graceful&skip_exit")
            await asyncio.sleep(_DRAIN_S)

    async def count_active(self) -> int:
        """Return the number of requests in Envoy without a complete answer."""
        try:
            text = await self._ask_admin("GET", "/stats?filter=downstream_rq_active")
        except OSError:
            return 0
        return sum(map(int, _ACTIVE.findall(text)))

    async def close(self) -> None:
        """End Envoy and give the ports up."""
        if self._supervised is not None:
            await self._supervised.stop(0.0)
        self._release()
        if self._lock is not None:
            os.close(self._lock)
        self._folder.cleanup()

    def _reserve(self, host: str, port: int | None, option: str) -> int | None:
        """Bind a port without listening, to reserve it while Envoy is down; ``option``: sets the port."""
        if port is None:
            return None
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            reserved = socket.socket(family, socket.SOCK_STREAM)
            self._reserved.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
            # Envoy shares the port by SO_REUSEPORT, which is set only now: binding with it would not fail where
            # another server listens, nor would port 0 be a port of this server alone.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound = reserved.getsockname()
        except OSError as error:
            raise listen_error(host, port, option, error) from None
        self._host = str(bound[0])
        return int(bound[1])

    def _release(self) -> None:
        for reserved in self._reserved:
            reserved.close()
        self._reserved = []

    def _write(self, name: str, text: str) -> str:
        """Write a file readable only by this user; return its path."""
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        return str(path)

    async def _spawn(self) -> LivingProcess:
        command = [str(self._binary), "-c", str(self.directory / "envoy.yaml"), "--concurrency", "2"]
        command += ["--drain-time-s", str(_DRAIN_S), "--disable-hot-restart", "--log-level", "warning"]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the server
                preexec_fn=_die_with_parent,
            )
        return LivingProcess(process.pid, process)

    async def _await_listening(self, envoy: LivingProcess) -> None:
        """Wait until Envoy listens or ends, without a time limit, since the machine may be busy."""
        while True:
            if envoy.has_ended:
                raise UnavailableError(f"Envoy ended as it started: {self._last_words()}")
            with contextlib.suppress(OSError):
                if "LIVE" in await self._ask_admin("GET", "/ready"):
                    return
            await asyncio.sleep(0.05)

    def _log_exit(self, pid: int) -> None:
        if self._supervised is not None and not self._supervised.is_stopping:
            self.restarts += 1
            LOGGER.warning("the edge ended, starts again", extra={"pid": pid, "last_words": self._last_words()})

    def _log_failure(self, error: GpuprofError) -> None:
        LOGGER.error("cannot start the edge", extra={"error": error.message})

    def _last_words(self) -> str:
        """Return the last line of Envoy's log."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:500] if lines else ""

    async def _ask_admin(self, method: str, target: str) -> str:
        """Return the body of Envoy's answer. Raises `OSError` without an answer."""
        reader, writer = await asyncio.open_unix_connection(str(self._admin))
        try:
            writer.write(f"{method} {target} HTTP/1.1\r\nHost: edge\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        return answer.decode(errors="replace").partition("\r\n\r\n")[2]


def remove_abandoned() -> None:
    """Remove the folders, with their private keys, of this user's servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.stat()
            is_new = time.time() - status.st_mtime < _STARTING_S
            if status.st_uid == os.geteuid() and not is_new and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that locks a folder until it is closed or its process ends; None: another has the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def listen_error(host: str, port: int, option: str, error: OSError) -> InputError:
    """Return the error of a server that cannot listen; ``option``: sets the port."""
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} is taken on {host}", f"choose another with {option}")
    return InputError(
        f"cannot listen on {host}:{port}: {error.strerror or error}",
        f"another {option}, or with --host an address of this machine",
    )


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends in any way."""
    _LIBC.prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
