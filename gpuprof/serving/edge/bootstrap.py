"""Envoy's configuration, made of ``envoy.yaml`` and the settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

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
    """Writes repeated parts out: Envoy and people read them more easily than anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: no part is replaced by an alias."""
        return True


def _fill(node: Any, values: dict[str, Any]) -> Any:
    """Return a part of the document with its settings; `_REMOVED` where its condition does not hold."""
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
