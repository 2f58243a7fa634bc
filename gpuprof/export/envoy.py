"""Envoy configuration of the edge, for a user's own Envoy in front of a server."""

from __future__ import annotations

from gpuprof.export.bundle import Bundle
from gpuprof.serving.edge.edge import EdgeSettings, render_bootstrap

_HEAD = """\
# Envoy in front of `gpuprof serve MAP --token-file FILE` on the same machine (127.0.0.1:8000).
# To be replaced: the token (twice), the paths of certificate and key, and the ports 8443 (HTTPS) and 8444 (gRPC).
# Streams of gRPC (ModelStreamInfer, reflection) need the edge that `gpuprof serve --grpc-port` starts itself.
"""
_SETTINGS = EdgeSettings(
    {"socket_address": {"address": "127.0.0.1", "port_value": 8000}},
    host="0.0.0.0",
    http_port=8443,
    grpc_port=8444,
    certificate="/etc/envoy/chain.pem",
    private_key="/etc/envoy/key.pem",
    token="REPLACE-THIS-TOKEN",
)


def envoy() -> Bundle:
    """Return one file, ``envoy.yaml``, which is the same for every map."""
    return Bundle({"envoy.yaml": _HEAD + render_bootstrap(_SETTINGS)})
