"""The server's own description, and what happens to thousands of requests that are made from it."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprof.serving.protocol.openapi import document
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running

pytestmark = serves_in_real_time

MANY = 10_000
JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 1.5, 1e308, float("nan"), float("inf"), "", "x", "FP64",
    "\ud800", "a" * 5000, [], [[]], [[[1.0]]], {}, {"data": []}, {"binary_data_size": 4}, {"binary_data_size": -1},
    [None] * 100,
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_every_address_that_is_described_answers_as_described(null_server: RunningServer) -> None:
    document = null_server.get("/openapi.json")[1]
    assert document["openapi"] == "3.1.0"
    assert "/v2/models/small/infer" in document["paths"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.endswith("/infer"):
                continue
            status, answer = null_server.get(path, method.upper())
            described = operation["responses"][str(status)]
            assert status == 200
            content = described.get("content", {}).get("application/json")
            if content is not None:
                jsonschema.validate(answer, content["schema"])


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v2", "GET, HEAD"),
        ("/v2/models/small/infer", "POST"),
        ("/v2/repository/index", "POST"),
        ("/metrics", "GET, HEAD"),
    ],
)
def test_a_method_that_an_address_lacks_is_told_which_it_has(
    null_server: RunningServer, path: str, allowed: str
) -> None:
    connection = null_server.client()
    connection.request("DELETE", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert (answer.status, answer.getheader("Allow")) == (405, allowed)


def test_the_description_has_the_bounds_that_requests_are_held_to(null_server: RunningServer) -> None:
    operation = null_server.get("/openapi.json")[1]["paths"]["/v2/models/small/infer"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}
    same = {"name": "OUTPUT0"}
    for wrong in (
        {"inputs": [{**tensor, "shape": [0, 1], "data": []}]},
        {"inputs": [{**tensor, "shape": [5, 1], "data": [1.0] * 5}]},  # of batches of 4
        {"inputs": [{**tensor, "data": []}]},
        {"inputs": [{**tensor, "shape": [2, 1]}]},
        {"inputs": [tensor], "outputs": [same, same]},
        {"inputs": [tensor], "outputs": [same, {**same, "id": 1}]},
        {"inputs": [tensor], "parameters": {"priority": 2**31 + 1}},
        {"inputs": [tensor], "parameters": {"timeout": 2**64}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        assert null_server.get("/v2/models/small/infer", "POST", json.dumps(wrong).encode())[0] == 400


def test_a_request_that_fits_the_description_is_answered(null_server: RunningServer) -> None:
    operation = null_server.get("/openapi.json")[1]["paths"]["/v2/models/small/infer"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}
    jsonschema.validate({"inputs": [tensor]}, schema)
    for good in ({**tensor, "shape": [4, 1], "data": [1.0, 2.5, -3e38, 3]}, {**tensor, "data": [1e38]}):
        jsonschema.validate({"inputs": [good]}, schema)
        assert null_server.get("/v2/models/small/infer", "POST", json.dumps({"inputs": [good]}).encode())[0] == 200
    for more in (
        {"id": None, "parameters": None, "outputs": None},
        {"outputs": [], "parameters": {"timeout": 5e6, "priority": 1.0}},
    ):
        request = {"inputs": [{**tensor, "shape": [1.0, 1]}], **more}
        jsonschema.validate(request, schema)
        assert null_server.get("/v2/models/small/infer", "POST", json.dumps(request).encode())[0] == 200
    for wrong in ({**tensor, "datatype": "FP64"}, {**tensor, "shape": [1, 2]}, {**tensor, "name": "X"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"inputs": [wrong]}, schema)
    status, answer = null_server.get("/v2/models/small/infer", "POST", json.dumps({"inputs": [tensor]}).encode())
    assert status == 200
    jsonschema.validate(answer, operation["responses"]["200"]["content"]["application/json"]["schema"])


def spec_of(max_batch: int, *inputs: tuple[str, list[int]]) -> ModelSpec:
    tensors = tuple(TensorSpec(f"x{number}", kind, tuple(shape)) for number, (kind, shape) in enumerate(inputs))
    return ModelSpec("m", "1", "null", tensors, tensors, max_batch)


def request_schema(spec: ModelSpec) -> dict[str, Any]:
    """The schema of what a model is asked."""
    operation = document([spec])["paths"]["/v2/models/m/infer"]["post"]
    schema: dict[str, Any] = operation["requestBody"]["content"]["application/json"]["schema"]
    return schema


def test_the_inputs_of_a_request_have_one_batch_and_the_values_that_it_makes() -> None:
    schema = request_schema(spec_of(3, ("FP32", [-1, 2]), ("INT64", [-1, 4, -1])))

    def request(rows: tuple[int, int], values: int) -> dict[str, Any]:
        first = {"name": "x0", "datatype": "FP32", "shape": [rows[0], 2], "data": [0.5] * values}
        open_one = {"name": "x1", "datatype": "INT64", "shape": [rows[1], 4, 1], "data": [1] * 4 * rows[1]}
        return {"inputs": [first, open_one]}

    for rows in (1, 2, 3):
        jsonschema.validate(request((rows, rows), 2 * rows), schema)
    for wrong in (request((1, 2), 2), request((2, 2), 2), request((4, 4), 8), request((2, 2), 5)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_each_output_is_asked_for_at_most_once() -> None:
    spec = spec_of(1, ("FP32", [-1, 1]), ("FP32", [-1, 1]))
    schema = request_schema(spec)
    inputs = [{"name": f"x{n}", "datatype": "FP32", "shape": [1, 1], "data": [1.0]} for n in range(2)]
    jsonschema.validate({"inputs": inputs, "outputs": [{"name": "x1"}, {"name": "x0"}]}, schema)
    for twice in ([{"name": "x1"}, {"name": "x1", "a": 1}], [{"name": "x0"}, {"name": "x0"}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"inputs": inputs, "outputs": twice}, schema)


def test_a_model_without_a_batch_has_exactly_its_values_and_one_that_json_cannot_carry_none() -> None:
    schema = request_schema(spec_of(0, ("UINT8", [2, 3])))
    tensor = {"name": "x0", "datatype": "UINT8", "shape": [2, 3], "data": [1] * 6}
    jsonschema.validate({"inputs": [tensor]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"inputs": [{**tensor, "data": [1] * 5}]}, schema)
    bfloat = {"name": "x0", "datatype": "BF16", "shape": [1, 1], "data": [1.0]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"inputs": [bfloat]}, request_schema(spec_of(1, ("BF16", [-1, 1]))))


class Asker:
    """Sends request after request on one connection, and counts what comes back."""

    def __init__(self, server: RunningServer) -> None:
        self.statuses: Counter[int] = Counter()
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            text = answer.read()
        except (ConnectionError, http.client.BadStatusLine):  # the last answer closed it
            self._connection.close()
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            text = answer.read()
        self.statuses[answer.status] += 1
        return answer.status, text


def tensors(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A tensor of the model, or one with something wrong about it."""
    shape = draw(st.lists(st.integers(-2, 5), max_size=3) | st.just([1, 1]))
    made: dict[str, Any] = {
        "name": draw(st.just(name) | st.text(max_size=5)),
        "datatype": draw(st.sampled_from(["FP32", "FP64", "BYTES", "INT8", "BOOL", "FP99"])),
        "shape": shape,
        "data": draw(st.lists(st.floats(width=32) | st.integers(-5, 5), max_size=6) | JSON),
    }
    for key in draw(st.lists(st.sampled_from(sorted(made)), max_size=1)):
        del made[key]
    if draw(st.booleans()):
        made["parameters"] = {"binary_data_size": draw(st.integers(-5, 50) | JSON)}
    return made


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes | None, dict[str, str]]:
    """A method, an address, a body and headers, near to what is right."""
    model = draw(st.sampled_from(["small", "large", "nobody", "sm%61ll", ""]))
    path = draw(
        st.sampled_from(["/v2", "/v2/models/stats", "/metrics", "/openapi.json", "/v2/repository/index", "/nothing"])
        | st.sampled_from(["", "/ready", "/config", "/stats", "/versions/1", "/versions/9/infer"]).map(
            lambda rest: f"/v2/models/{model}{rest}"
        )
        | st.just(f"/v2/models/{model}/infer")
    )
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "HEAD", "PUT", "DELETE"]))
    request: Any = {"inputs": [tensors(draw, "INPUT0") for _ in range(draw(st.integers(0, 2)))]}
    if draw(st.booleans()):
        request["outputs"] = draw(st.just([{"name": "OUTPUT0"}]) | JSON)
    if draw(st.booleans()):
        request["parameters"] = draw(
            st.fixed_dictionaries({"timeout": st.integers(-1, 1 << 65) | JSON, "priority": st.integers() | JSON}) | JSON
        )
    body = json.dumps(draw(st.just(request) | JSON)).encode()
    headers = {}
    if draw(st.booleans()):
        headers["Inference-Header-Content-Length"] = str(draw(st.integers(-1, len(body) + 5)))
        body += draw(st.binary(max_size=12))
    return method, path, draw(st.just(body) | st.none() | st.binary(max_size=30)), headers


def check(asker: Asker, request: tuple[str, str, bytes | None, dict[str, str]]) -> None:
    status, text = asker.ask(*request)
    assert status < 500 or status == 503, (request, text)
    assert b"Traceback" not in text
    if status >= 400 and request[0] != "HEAD":
        assert isinstance(json.loads(text)["error"], str)


@pytest.fixture(scope="module")
def shared_asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    document = map_of({"small": "null:4", "large": "null:600"}, [replica("small", batch=4), replica("large")])
    with running(tmp_path_factory.mktemp("asked"), document) as server:
        asker = Asker(server)
        yield asker
        asker.close()
        code, errors = server.stop()
    assert (code, errors) == (0, "drained\n")  # nothing was logged, above all no traceback
    assert asker.statuses[200] > 0 and asker.statuses[400] > 0 and asker.statuses[404] > 0


class Spoiler:
    """Makes requests that are right but for a few things, at random."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._addresses = [
            (method.upper(), path) for path, operations in document["paths"].items() for method in operations
        ]

    def request(self) -> tuple[str, str, bytes | None, dict[str, str]]:
        pick = self._random.choice
        method, path = pick(self._addresses) if self._random.random() < 0.3 else ("POST", pick(INFER))
        size = 1 if "small" in path else 150
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, size], "data": [0.5] * size}
        request: Any = {
            "id": "1",
            "inputs": [tensor],
            "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": pick([True, False])}}],
            "parameters": {"timeout": 5_000_000, "priority": 1, "binary_data_output": pick([True, False])},
        }
        for _ in range(self._random.choice([0, 1, 1, 2, 3])):
            request = self._spoil_node(request)
        body = json.dumps(request).encode("utf-8", "surrogatepass")
        headers = {}
        if self._random.random() < 0.2:
            headers["Inference-Header-Content-Length"] = str(pick([len(body), len(body) - 3, 0, -1, 10**19, "x"]))
            body += self._random.randbytes(self._random.randrange(20))
        if self._random.random() < 0.1:
            body = body[: self._random.randrange(len(body))]
        if self._random.random() < 0.05:
            path += pick(["/", "?x=%ff", "/%00", "%2e%2e", "/versions/9", "\xe9"])
        return pick([method] * 9 + ["PATCH"]), quote(path, safe="/?%="), body, headers

    def _spoil_node(self, node: Any) -> Any:
        """Return a copy in which something somewhere is replaced, left away or said twice."""
        if self._random.random() < 0.15 or not isinstance(node, dict | list) or not node:
            return self._random.choice(JUNK)
        if isinstance(node, list):
            place = self._random.randrange(len(node))
            how = self._random.random()
            if how < 0.1:
                return node + node
            return node[:place] + ([] if how < 0.2 else [self._spoil_node(node[place])]) + node[place + 1 :]
        key = self._random.choice(list(node))
        if self._random.random() < 0.1:
            return {name: value for name, value in node.items() if name != key}
        return node | {key: self._spoil_node(node[key])}


INFER = [f"/v2/models/{model}{version}/infer" for model in ("small", "large") for version in ("", "/versions/1")]


@pytest.mark.slow
def test_ten_thousand_spoiled_requests_give_no_server_error_and_no_traceback(shared_asker: Asker) -> None:
    _, text = shared_asker.ask("GET", "/openapi.json", None, {})
    spoiler = Spoiler(json.loads(text), seed=6)
    for _ in range(MANY):
        check(shared_asker, spoiler.request())
    assert shared_asker.statuses[200] > MANY / 10 and shared_asker.statuses[400] > MANY / 10


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(request_=requests())
def test_random_requests_give_no_server_error_and_no_traceback(
    shared_asker: Asker, request_: tuple[str, str, bytes | None, dict[str, str]]
) -> None:
    check(shared_asker, request_)
