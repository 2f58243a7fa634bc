"""The server's own description."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer

pytestmark = serves_in_real_time


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
