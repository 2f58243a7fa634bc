"""A server to be attacked: with a token, by HTTP and gRPC, plain or with TLS; memory that is free is overwritten."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import psutil

from bench.serving import deployment

TOKEN = "a-token-of-the-benchmark-0123456789"
BUFFER_MB = 256
#: A model of this path takes and gives back a string for each item of a batch.
STRINGS = "strings"


@dataclass(frozen=True)
class AttackTarget:
    """A server: its process, and its ports; ``authority`` is the certificate (PEM) of one with TLS."""

    process: psutil.Process
    http: int
    grpc: int
    authority: str = ""

    def client(self) -> HTTPConnection:
        """Return a connection for ordinary requests of HTTP."""
        if not self.authority:
            return HTTPConnection("127.0.0.1", self.http, timeout=60)
        context = ssl.create_default_context(cadata=self.authority)
        return HTTPSConnection("127.0.0.1", self.http, timeout=60, context=context)


@contextmanager
def hostile_server(
    *options: str, models: Mapping[str, str] | None = None, secured: bool = False
) -> Iterator[AttackTarget]:
    """Serve null models, and models of strings, with a token; memory that is given back is overwritten."""
    paths = {"m": "null:600k"} if models is None else models
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        document = deployment("null:4", 1)
        (partition,) = document["nodes"][0]["gpus"][0]["partitions"]
        partition["replicas"] = make_replicas(partition["replicas"][0], list(paths))
        document["models"] = {
            name: document["models"]["m"] | {"path": _write_strings(folder) if path == STRINGS else path}
            for name, path in paths.items()
        }
        (map_path := folder / "map.json").write_text(json.dumps(document))
        token = _write_secret(folder / "token", TOKEN)
        authority, certified = _certify(folder) if secured else ("", [])
        command = [sys.executable, "-m", "gpuprof", "serve", str(map_path), "--port", "0", "--grpc-port", "0"]
        command += ["--buffer-mb", str(BUFFER_MB), "--token-file", token, *certified, *options]
        environment = {**os.environ, "GPUPROF_POISON": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            words = [word for word in process.stdout.readline().split() if "://" in word]
            ports = [int(word.rsplit(":", 1)[1]) for word in words]
            try:
                yield AttackTarget(psutil.Process(process.pid), ports[0], ports[1], authority)
            finally:
                process.terminate()


def make_replicas(replica: dict[str, Any], models: Sequence[str]) -> list[dict[str, Any]]:
    """Return a replica of each model like the given one, with less of the machine where it has few cores."""
    share_pct = min(replica["sm_share_pct"], 100.0 / len(models))
    return [replica | {"model": model, "sm_share_pct": share_pct} for model in models]


def _write_secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def _certify(folder: Path) -> tuple[str, list[str]]:
    """Write a key and its certificate; return the authority's, and the options of a server."""
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    (chain := folder / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    key = _write_secret(folder / "key.pem", certificate.private_key_pem.bytes().decode())
    return authority.cert_pem.bytes().decode(), ["--tls-cert", str(chain), "--tls-key", key]


def _write_strings(folder: Path) -> str:
    """Write a model whose output are the strings of its input."""
    import onnx
    from onnx import TensorProto, helper

    ends = [
        helper.make_tensor_value_info(name, TensorProto.STRING, ["batch", "count"]) for name in ("INPUT0", "OUTPUT0")
    ]
    graph = helper.make_graph([helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])], "strings", ends[:1], ends[1:])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path := folder / "strings.onnx")
    return str(path)
