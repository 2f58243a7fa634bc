import struct
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.router.infer_request import (
    MAX_STRINGS,
    RequestBody,
    Urgency,
    read_json_urgency,
    read_request,
    write_response,
)
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import OutputTensor, RefusedError

SPEC = ModelSpec(
    "m",
    "1",
    "test",
    (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("s", "BYTES", (-1, 1))),
    (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("t", "BYTES", (-1, 1))),
    4,
)
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
S = {"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": ["é"]}


def read_body(head: object, binary: bytes = b"") -> Any:
    text = orjson.dumps(head)
    return read_request(SPEC, RequestBody(text + binary, len(text)))


def test_json_inputs_become_bytes_in_the_order_of_the_model() -> None:
    request = read_body({"id": "7", "inputs": [S, X], "parameters": {"timeout": 5000, "priority": 2}})
    assert [bytes(tensor.data) for tensor in request.inputs] == [struct.pack("2f", 1, 2), b"\x02\x00\x00\x00\xc3\xa9"]
    assert (request.id, request.rows, request.urgency) == ("7", 1, Urgency(5.0, 2))


def test_how_urgent_a_request_is_can_be_read_of_its_json_alone() -> None:
    assert read_json_urgency(orjson.dumps({"parameters": {"timeout": 5000, "priority": 2}})) == Urgency(5.0, 2)
    assert read_json_urgency(orjson.dumps({"inputs": "not looked at"})) == Urgency(None, 0)
    for wrong in (b"{", b"[]", b'{"parameters": {"timeout": -1}}', b'{"parameters": 3}'):
        with pytest.raises(RefusedError) as refused:
            read_json_urgency(wrong)
        assert refused.value.status == 400


def test_nested_data_is_flattened() -> None:
    nested = {**X, "shape": [2, 2], "data": [[1, 2], [3, 4]]}
    two = {**S, "shape": [2, 1], "data": [["a"], ["b"]]}
    request = read_body({"inputs": [nested, two]})
    assert request.rows == 2
    assert bytes(request.inputs[0].data) == struct.pack("4f", 1, 2, 3, 4)


def test_binary_tensors_follow_in_the_order_of_the_request_and_stay_in_the_arena() -> None:
    data_s, data_x = b"\x01\x00\x00\x00a", struct.pack("2f", 3, 4)
    binary_s = {"name": "s", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data_s)}}
    binary_x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    head = {"inputs": [binary_s, binary_x]}
    request, text = read_body(head, data_s + data_x), orjson.dumps(head)
    body = RequestBody(text + data_s + data_x, len(text))
    assert [bytes(tensor.data) for tensor in request.find_tensors(body)] == [data_x, data_s]
    start = body.offset = 4096
    start += len(text)
    assert [tensor.data for tensor in request.find_tensors(body)] == [(start + 5, 8), (start, 5)]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ([], "must be a JSON object"),
        ({}, 'list of "inputs"'),
        ({"inputs": [X]}, "needs input 's'"),
        ({"inputs": [X, X, S]}, "given twice"),
        ({"inputs": [{**X, "name": "z"}, S]}, "no input 'z'"),
        ({"inputs": [{**X, "name": 3}, S]}, "no input 3"),
        ({"inputs": [{**X, "datatype": "FP64"}, S]}, "has type FP32 but got 'FP64'"),
        ({"inputs": [{**X, "shape": [1, 3]}, S]}, r"has shape \[-1, 2\] but got \[1, 3\]"),
        ({"inputs": [{**X, "shape": [1, -2]}, S]}, "list of whole numbers"),
        ({"inputs": [{**X, "shape": [2**63, 2]}, S]}, "list of whole numbers from 0 to 9223372036854775806"),
        ({"inputs": [{**X, "shape": [True, 2]}, S]}, "list of whole numbers"),
        ({"inputs": [{**X, "shape": "12"}, S]}, "list of whole numbers"),
        ({"inputs": [{**X, "data": [1.0]}, S]}, "needs 2 values but got 1"),
        ({"inputs": [{**X, "data": [[1.0], 2.0]}, S]}, "nested unevenly"),
        ({"inputs": [{**X, "data": ["a", "b"]}, S]}, "must hold numbers"),
        ({"inputs": [{**X, "data": None}, S]}, "neither data nor binary data"),
        ({"inputs": [{**X, "shape": [2, 2], "data": [1, 2, 3, 4]}, S]}, "same batch"),
        ({"inputs": [{**X, "shape": [0, 2], "data": []}, {**S, "shape": [0, 1], "data": []}]}, "batches of 1 to 4"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": 8}}, S]}, "both data and binary"),
        ({"inputs": [{**X, "parameters": {"shared_memory_region": "r"}}, S]}, "not supported"),
        ({"inputs": [{**X, "parameters": []}, S]}, '"parameters" must be an object'),
        ({"inputs": [X, S], "outputs": [{"name": "q"}]}, "has no output 'q'"),
        ({"inputs": [X, S], "outputs": [{"name": "y"}, {"name": "y"}]}, "only one output 'y'"),
        ({"inputs": [X, S], "outputs": 3}, '"outputs" must be a list'),
        ({"inputs": [X, S], "id": 3}, '"id" must be a string'),
        ({"inputs": [X, S], "parameters": {"timeout": -1}}, "'timeout' must be a whole number"),
        ({"inputs": [X, S], "parameters": {"timeout": 1.5}}, "'timeout' must be a whole number"),
        ({"inputs": [{**X, "shape": [1.5, 2]}, S]}, "list of whole numbers"),
    ],
)
def test_what_is_wrong_is_said(head: object, message: str) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        read_body(head)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("size", "binary"), [(8, b"1234567"), (8, b"123456789"), (4, b"1234"), (-8, b""), (2**70, b"")]
)
def test_binary_data_of_another_size_than_said_is_refused(size: int, binary: bytes) -> None:
    binary_x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": size}}
    try:
        head = {"inputs": [S, binary_x]}
        orjson.dumps(head)
    except TypeError:
        return
    with pytest.raises(RefusedError):
        read_body(head, binary)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "shape", "data", "parameters"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries({}, optional={"inputs": JSON, "outputs": JSON, "parameters": JSON, "id": JSON}),
    st.binary(max_size=20),
)
def test_whatever_comes_is_read_or_refused_with_400(head: dict[str, Any], binary: bytes) -> None:
    try:
        read_body(head, binary)
    except RefusedError as refused:
        assert refused.status == 400


OUTPUTS = [OutputTensor(0, [1, 2], struct.pack("2f", 1, 2)), OutputTensor(1, [1, 1], b"\x01\x00\x00\x00a")]


def test_an_answer_in_json() -> None:
    text, binary = write_response(SPEC, read_body({"id": "7", "inputs": [X, S]}), OUTPUTS)
    assert not binary
    assert orjson.loads(text) == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]},
            {"name": "t", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
        ],
    }


def test_an_answer_has_the_outputs_that_were_asked_for_in_their_order_and_form() -> None:
    outputs = [{"name": "t", "parameters": {"binary_data": True}}, {"name": "y"}]
    text, binary = write_response(SPEC, read_body({"inputs": [X, S], "outputs": outputs}), OUTPUTS)
    answered = orjson.loads(text)["outputs"]
    assert [entry["name"] for entry in answered] == ["t", "y"]
    assert answered[0]["parameters"] == {"binary_data_size": 5}
    assert binary == [OUTPUTS[1].data]


def test_all_outputs_are_binary_by_one_parameter() -> None:
    _, binary = write_response(SPEC, read_body({"inputs": [X, S], "parameters": {"binary_data_output": True}}), OUTPUTS)
    assert binary == [output.data for output in OUTPUTS]


def test_a_tensor_of_strings_may_have_only_so_many_however_it_comes() -> None:
    many = MAX_STRINGS + 1
    spec = ModelSpec("m", "1", "test", (TensorSpec("s", "BYTES", (-1, -1)),), (), 4)
    entry = {"name": "s", "datatype": "BYTES", "shape": [1, many]}
    binary = {**entry, "parameters": {"binary_data_size": 4 * many}}
    for written, tensor in (({**entry, "data": [""]}, b""), (binary, bytes(4 * many))):
        text = orjson.dumps({"inputs": [written]})
        with pytest.raises(RefusedError, match=f"may have {MAX_STRINGS} strings but got {many}"):
            read_request(spec, RequestBody(text + tensor, len(text)))


@pytest.mark.parametrize("wrong", [{"datatype": "é" * 100_000}, {"parameters": {"binary_data_size": [1] * 100_000}}])
def test_what_is_wrong_is_not_said_at_the_length_at_which_it_came(wrong: dict[str, object]) -> None:
    with pytest.raises(RefusedError) as refused:
        read_body({"inputs": [{key: value for key, value in X.items() if key != "data"} | wrong]})
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(("datatype", "value"), [("FP32", 1e39), ("FP32", -1e40), ("FP16", 70000.0), ("FP16", 65520)])
def test_a_number_beyond_a_floating_point_type_is_refused(datatype: str, value: float) -> None:
    spec = ModelSpec("m", "1", "test", (TensorSpec("x", datatype, (-1, 2)),), (), 4)
    text = orjson.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 2], "data": [1.0, value]}]})
    with pytest.raises(RefusedError, match=f"input 'x' has a value that is out of the range of {datatype}"):
        read_request(spec, RequestBody(text, len(text)))


def test_a_string_that_is_no_text_is_refused_by_the_name_of_its_input() -> None:
    bad = b"\x02\x00\x00\x00\xff\xfe"
    entry = {"name": "s", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(bad)}}
    with pytest.raises(RefusedError, match="input 's' has a string that is not UTF-8"):
        read_body({"inputs": [X, entry]}, bad)


@pytest.mark.parametrize(
    ("tensor", "max_batch", "data", "shape", "sent"),
    [
        (TensorSpec("x", "FP32", (-1, 2)), 4, bytes(8), [1, 2], bytes(8)),
        (TensorSpec("x", "UINT8", (-1, 2, -1)), 4, bytes(6), [1, 2, 3], bytes(6)),
        (TensorSpec("x", "FP32", (3,)), 0, bytes(12), [3], bytes(12)),
        (TensorSpec("x", "BYTES", (-1, 1)), 4, b"ab", [1, 1], b"\x02\x00\x00\x00ab"),
    ],
)
def test_a_body_without_json_is_the_only_input(
    tensor: TensorSpec, max_batch: int, data: bytes, shape: list[int], sent: bytes
) -> None:
    spec = ModelSpec("m", "1", "test", (tensor,), (TensorSpec("y", "FP32", (-1, 2)),), max_batch)
    body = RequestBody(data)
    request = read_request(spec, body)
    assert (request.rows, request.binary) == (1, None)
    assert [(read.shape, bytes(read.data)) for read in request.find_tensors(body)] == [(shape, sent)]


@pytest.mark.parametrize(("shape", "size"), [((-1, 2), 9), ((-1, -1, -1), 8)])
def test_a_body_without_json_must_fit_the_input(shape: tuple[int, ...], size: int) -> None:
    spec = ModelSpec("m", "1", "test", (TensorSpec("x", "FP32", shape),), (), 4)
    with pytest.raises(RefusedError) as refused:
        read_request(spec, RequestBody(bytes(size), 0))
    assert refused.value.status == 400
    with pytest.raises(RefusedError, match="2 inputs"):
        read_request(SPEC, RequestBody(bytes(8), 0))
