"""``apply``: move a running server to another map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.map_file import read_map
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Result
from gpuprof.pipeline.serve_settings import DEFAULT_PORT
from gpuprof.serving.control import send_apply


@dataclass(frozen=True, kw_only=True)
class ApplyResult(Result):
    """The replicas kept, started and stopped by a server, by name."""

    kept: tuple[str, ...]
    started: tuple[str, ...]
    stopped: tuple[str, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each replica: its name and whether it was kept, started or stopped."""
        changes = {"kept": self.kept, "started": self.started, "stopped": self.stopped}
        return [{"replica": name, "change": change} for change, names in changes.items() for name in names]


def apply(map_file: PathArgument, *, port: int = DEFAULT_PORT) -> ApplyResult:
    """Move the server on this machine to another map: only changed replicas start and stop, no request is lost.

    Parameters
    ----------
    map_file : path
        The map to serve from now on; relative paths of model files start at its folder.
    port : int
        HTTP port of the server.

    Raises
    ------
    UnavailableError
        When no server of this user listens on the port, or the server lacks a resource that the map needs.
    InputError
        When the file holds no map, or the server refuses the map.
    """
    path = Path(map_file)
    # Read the map here, too, so that errors in the file are reported without a request to the server.
    read_map(path)
    answer = send_apply(port, path)
    return ApplyResult(kept=tuple(answer["kept"]), started=tuple(answer["started"]), stopped=tuple(answer["stopped"]))
