"""The server under load: its address, its models, and requests for them."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from gpuprof.domain.deployment import model_address
from gpuprof.domain.sizes import Sizes, parse_mix
from gpuprof.errors import InputError, UnavailableError
from gpuprof.serving.transport.datatypes import NUMPY_NAMES, ONNX_NAMES, TensorSpec, join_strings
from gpuprof.serving.transport.security import client_context, is_loopback

if TYPE_CHECKING:
    from gpuprof.graph.inputs import InputData, InputShape
    from gpuprof.serving.transport.datatypes import Array, TensorSpec

#: Number of inputs per model, which are sent alternately.
VARIANTS = 20
#: Characters that no host name has, and which would end a line of the request.
_NO_HOST = re.compile(r"[\s\x00-\x1f\x7f]")


class TensorData(NamedTuple):
    """A tensor of a request or an answer, as bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Target:
    """A server of the Open Inference Protocol over HTTP."""

    host: str
    port: int
    token: str = field(default="", repr=False)  #: Sent with every request; empty: none is.
    is_encrypted: bool = False  #: True if the target speaks TLS.
    authority: Path | None = None  #: PEM file of the trusted certificates; None: the system's.

    @classmethod
    def parse(cls, url: str, token: str = "", authority: Path | None = None) -> Target:
        """Read ``http://host:port``, ``https://host:port`` or ``host:port``.

        Raises `InputError` for anything else, and for a token that would cross the network unencrypted.
        """
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or _NO_HOST.search(host) or parts.scheme not in ("", "http", "https"):
            raise InputError(f"cannot read the address {url!r}", "write http://127.0.0.1:8000")
        if parts.path.strip("/") or parts.query:
            shorter = url[: url.index(parts.netloc) + len(parts.netloc)]
            raise InputError(f"the address {url!r} has a path, and requests go to /v2 at its root", f"write {shorter}")
        is_encrypted = parts.scheme == "https"
        if token and not is_encrypted and not is_loopback(host):
            raise InputError(f"the token would go to {host} for everybody to read", f"write https://{host}")
        return cls(host, (443 if is_encrypted else 80) if port is None else port, token, is_encrypted, authority)

    def __str__(self) -> str:
        return f"http{'s' if self.is_encrypted else ''}://{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without TLS.

        Raises `InputError` when the authority is no certificate.
        """
        return client_context(self.authority) if self.is_encrypted else None

    def _connection(self) -> http.client.HTTPConnection:
        context = self.context()
        if context is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=10)
        return http.client.HTTPSConnection(self.host, self.port, timeout=10, context=context)

    def get(self, path: str) -> Any:
        """Return the JSON of the answer to a GET.

        Raises `UnavailableError` when no server answers there; `InputError` when the answer is an error or no JSON.
        """
        connection = self._connection()
        try:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            text = answer.read()
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise UnavailableError(f"{self} is not trusted: {reason}", "--ca-file names what is to be") from None
        except (OSError, http.client.HTTPException):
            raise UnavailableError(
                f"no server answers at {self}", "start one with gpuprof serve map.json, or give its address"
            ) from None
        finally:
            connection.close()
        try:
            document = json.loads(text) if text else None
        except ValueError:
            raise InputError(f"{self}{path} does not answer in JSON: is it a server of the protocol?") from None
        if answer.status >= 400:
            message = document.get("error") if isinstance(document, dict) else None
            raise InputError(f"{self}{path} answers {answer.status}: {message or answer.reason}")
        return document

    def model_inputs(self, model: str) -> list[TensorSpec]:
        """Return the inputs of a model as the server describes them. Raises `GpuprofError` as `get` does."""
        return self._read_specs(model, "inputs")

    def has_model(self, model: str) -> bool:
        """Return whether the server has a model. Raises `UnavailableError` when no server answers."""
        try:
            self.get(model_address(model))
        except UnavailableError:
            raise
        except InputError:
            return False
        return True

    def model_outputs(self, model: str) -> list[TensorSpec]:
        """Return the outputs of a model as the server describes them. Raises `GpuprofError` as `get` does."""
        return self._read_specs(model, "outputs")

    def _read_specs(self, model: str, kind: str) -> list[TensorSpec]:
        document = self.get(model_address(model))
        try:
            return [TensorSpec(t["name"], t["datatype"], tuple(t["shape"])) for t in document[kind]]
        except (KeyError, TypeError):
            raise InputError(f"{self} describes model {model!r} in a way that is not the protocol's") from None

    def statistics(self, model: str) -> dict[str, Any] | None:
        """Return the server's statistics of a model, None where the server keeps none."""
        try:
            document = self.get(f"{model_address(model)}/stats")
            stats: dict[str, Any] = document["model_stats"][0]
            return stats
        except (InputError, KeyError, TypeError, IndexError):
            return None


def requests_for(target: Target, model: str, path: str | None, seed: int, dims: str | None = None) -> tuple[bytes, ...]:
    """Return complete HTTP requests with random tensors of one row, their sizes interleaved by frequency.

    Raises `GpuprofError` when the server does not have the model, the model lacks a dimension of ``dims``, or a free
    dimension has neither a given nor a usual size. ``path``: its ONNX file, which determines valid indices for
    embedding tables; None: guessed from the server's metadata; ``dims``: sizes of the model's free dimensions, or their
    distribution, as in slo.csv.
    """
    return tuple(join_request(target, model, inputs) for inputs in random_tensors(target, model, path, seed, dims))


def random_tensors(
    target: Target, model: str, path: str | None, seed: int, dims: str | None = None
) -> tuple[list[TensorData], ...]:
    """Return the input tensors of each request that `requests_for` makes."""
    specs = target.model_inputs(model)
    return tuple(
        _to_tensors(specs, _inputs(specs, path, seed + variant, sizes))
        for variant, sizes in enumerate(_spread_sizes(dims))
    )


def requests_of_data(target: Target, model: str, data: InputData) -> tuple[bytes, ...]:
    """Return whole HTTP requests with the samples of a file, in their order.

    Raises `GpuprofError` when the server does not have the model.
    """
    specs = target.model_inputs(model)
    return tuple(join_request(target, model, _to_tensors(specs, sample)) for sample in data.samples)


def input_shapes(target: Target, model: str) -> tuple[InputShape, ...]:
    """Return the input shapes of a model from its metadata; an open first dimension is the batch.

    Raises `GpuprofError` as `Target.get` does.
    """
    from gpuprof.graph.inputs import InputShape

    return tuple(
        InputShape(
            spec.name,
            ONNX_NAMES[spec.datatype],
            tuple(None if size == -1 else size for size in spec.shape),
            0 if spec.shape[:1] == (-1,) else None,
        )
        for spec in target.model_inputs(model)
    )


def describe_assumed(target: Target, model: str, path: str | None, dims: str | None) -> str | None:
    """Return a remark on assumed sizes of a model's requests, None without assumptions.

    Raises `GpuprofError` as `requests_for` does.
    """
    if dims is not None:
        return None
    if path is not None and Path(path).is_file():
        from gpuprof.graph.load import describe_assumed_sizes, load_runnable, read_fixed_batch

        return describe_assumed_sizes(load_runnable(Path(path), read_fixed_batch(Path(path)) or 1, model))
    free = [name for spec in target.model_inputs(model) for name in _free_names(spec)]
    if not free:
        return None
    return f"{model}: {', '.join(f'{name}=1' for name in free)} assumed; another size: --dim {free[0]}=SIZE"


def _spread_sizes(dims: str | None) -> list[Sizes]:
    """Return the sizes of each variant, in the proportions of the distribution, spread evenly."""
    parts = (((), 1.0),) if dims is None else parse_mix(dims).parts
    if len(parts) == 1:
        return [parts[0][0]] * VARIANTS
    counts = [max(1, round(part * VARIANTS)) for _, part in parts]
    places = [
        ((turn + 0.5) / count, sizes) for (sizes, _), count in zip(parts, counts, strict=True) for turn in range(count)
    ]
    return [sizes for _, sizes in sorted(places)]


def _free_names(spec: TensorSpec) -> list[str]:
    return [f"{spec.name}:{axis}" for axis, size in enumerate(spec.shape) if axis and size == -1]


def _to_tensors(specs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> list[TensorData]:
    return [
        TensorData(spec.name, spec.datatype, inputs[spec.name].shape, _bytes(inputs[spec.name], spec.datatype))
        for spec in specs
    ]


def join_request(target: Target, model: str, tensors: Sequence[TensorData]) -> bytes:
    """Return an inference request with binary tensors, head and body."""
    headers = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in tensors
    ]
    text = json.dumps({"inputs": headers, "parameters": {"binary_data_output": True}}).encode()
    body = text + b"".join(tensor.data for tensor in tensors)
    own_headers = "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())
    head = (
        f"POST {model_address(model)}/infer HTTP/1.1\r\n"
        f"Host: {target.host}:{target.port}\r\n"
        "Content-Type: application/octet-stream\r\n"
        f"{own_headers}"
        f"Inference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _bytes(array: Array, datatype: str) -> bytes:
    if datatype == "BYTES":
        return join_strings([str(text).encode() for text in array.ravel()])
    return array.tobytes()


def _inputs(specs: list[TensorSpec], path: str | None, seed: int, sizes: Sizes) -> Mapping[str, Array]:
    if path is not None and Path(path).is_file():
        from gpuprof.graph.inputs import random_inputs
        from gpuprof.graph.load import load_runnable, require_sizes

        return random_inputs(require_sizes(load_runnable(Path(path), dims=dict(sizes))), seed)
    free = [name for spec in specs for name in _free_names(spec)]
    if unknown := [name for name, _ in sizes if name not in free]:
        raise InputError(
            f"the server does not say which dimension {unknown[0]!r} is, and the model's file is not there",
            f"it leaves open: {', '.join(free) or 'none'}",
        )
    return {spec.name: _make_random_input(spec, seed + position, dict(sizes)) for position, spec in enumerate(specs)}


def _make_random_input(spec: TensorSpec, seed: int, sizes: Mapping[str, int]) -> Array:
    import numpy as np

    random = np.random.default_rng(seed)
    shape = tuple(sizes.get(f"{spec.name}:{axis}", 1) if size == -1 else size for axis, size in enumerate(spec.shape))
    if spec.datatype == "BYTES":
        return np.full(shape, "gpuprof", dtype=object)
    if spec.datatype == "BF16":  # the upper half of a float32
        bits = random.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    kind = np.dtype(NUMPY_NAMES[spec.datatype])
    if kind.kind == "f":
        return random.standard_normal(shape).astype(kind)
    return random.integers(0, 2, shape).astype(kind)


_JSON_LENGTH = b"inference-header-content-length:"


@dataclass(frozen=True, slots=True)
class NextStep:
    """A later step of a chain."""

    target: Target
    model: str
    variants: Sequence[Sequence[TensorData]]  #: Random inputs, sent alternately.
    #: The output of the step before that is sent as an input, by the input's name; other inputs are random.
    sources: Mapping[str, str]

    def make_request(self, answer: bytes, number: int) -> bytes:
        """Return the whole HTTP request that follows ``answer``, the step before's whole HTTP answer."""
        outputs: dict[str, TensorData] = {}
        with suppress(ValueError, KeyError, TypeError):  # an answer that is not the protocol's
            outputs = {tensor.name: tensor for tensor in read_outputs(answer)}
        inputs = self.variants[number % len(self.variants)]
        fed = [outputs.get(self.sources.get(tensor.name, ""), tensor)._replace(name=tensor.name) for tensor in inputs]
        return join_request(self.target, self.model, fed)


def read_outputs(answer: bytes) -> list[TensorData]:
    """Return the binary tensors of an HTTP answer; empty for an answer in another form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(_JSON_LENGTH)]
    if not lengths:
        return []
    begin, tensors = int(lengths[0]), []
    for output in json.loads(body[:begin])["outputs"]:
        size = int(output.get("parameters", {}).get("binary_data_size", 0))
        tensors.append(
            TensorData(output["name"], output["datatype"], tuple(output["shape"]), body[begin : begin + size])
        )
        begin += size
    return tensors


def match_outputs(outputs: Sequence[TensorSpec], inputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return for each input, by name, the output that fits it: one of the same name, else the first unused one.

    An output fits if its datatype is the same and its shape may be.
    """
    left = list(outputs)
    sources: dict[str, str] = {}
    for spec in sorted(inputs, key=lambda spec: spec.name not in {output.name for output in outputs}):
        same_type = (output for output in left if output.datatype == spec.datatype)
        if fitting := [output for output in same_type if _may_equal(output.shape, spec.shape)]:
            source = min(fitting, key=lambda output: output.name != spec.name)
            sources[spec.name] = source.name
            left.remove(source)
    return sources


def _may_equal(first: Sequence[int], second: Sequence[int]) -> bool:
    return len(first) == len(second) and all(a == b or -1 in (a, b) for a, b in zip(first, second, strict=True))
