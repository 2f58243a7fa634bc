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

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running

pytestmark = serves_in_real_time

MANY = 1000
JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 1.5, 1e308, float("nan"), float("inf"), "", "x", "FP64",
    "\ud800", "a" * 5000, [], [[]], [[[1.0]]], {}, {"data": []}, {"binary_data_size": 4}, {"binary_data_size": -1},
    [None] * 100,
]  # fmt: skip


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


def test_a_thousand_spoiled_requests_give_no_server_error_and_no_traceback(shared_asker: Asker) -> None:
    _, text = shared_asker.ask("GET", "/openapi.json", None, {})
    spoiler = Spoiler(json.loads(text), seed=6)
    for _ in range(MANY):
        check(shared_asker, spoiler.request())
    assert shared_asker.statuses[200] > MANY / 10 and shared_asker.statuses[400] > MANY / 10
