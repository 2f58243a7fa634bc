from __future__ import annotations

import pytest

from gpuprof.serving.protocol.grpc_messages import protocol
from gpuprof.serving.protocol.proto_file import ProtoFile

SMALL = """
syntax = "proto3"; // a comment
package p;
enum Kind { NONE = 0; SOME = 1; }
message Outer {
  message Inner { repeated int64 n = 3; }
  map<string, Inner> by_name = 1;
  oneof choice { bool yes = 2; string why = 4; }
  Kind kind = 5;
}
service S { rpc Call(Outer) returns (stream Outer); }
"""


def test_messages_maps_enums_and_oneofs_survive_the_wire() -> None:
    kind = ProtoFile(SMALL, "small.proto").message("Outer")
    message = kind(why="x", kind=1)
    message.by_name["a"].n.extend([1, -2])
    again = kind.FromString(message.SerializeToString())
    assert list(again.by_name["a"].n) == [1, -2]
    assert (again.WhichOneof("choice"), again.kind) == ("why", 1)


def test_services_are_known() -> None:
    (method,) = ProtoFile(SMALL, "small.proto").methods["S"]
    assert (method.name, method.request, method.streams_in, method.streams_out) == ("Call", "Outer", False, True)


@pytest.mark.parametrize("text", ['syntax = "proto2";', "import x;", "message A {", "message A { int32 x = y; }"])
def test_what_it_does_not_understand_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        ProtoFile(text, "bad.proto")


def test_every_name_and_number_is_the_one_that_the_client_of_triton_uses() -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    theirs = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}

    def compare(ours, other) -> int:  # type: ignore[no-untyped-def]
        for field in ours.fields:
            known = other.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (known.number, known.type, known.is_repeated), (
                field.full_name
            )
        for nested in ours.nested_types:
            compare(nested, other.nested_types_by_name[nested.name])
        for enum in ours.enum_types:
            assert [(v.name, v.number) for v in enum.values] == [
                (v.name, v.number) for v in other.enum_types_by_name[enum.name].values
            ]
        return len(ours.fields)

    names = [method.request for method in protocol().methods["GRPCInferenceService"]]
    names += [method.response for method in protocol().methods["GRPCInferenceService"]]
    names += [
        "ModelConfig",
        "ModelInput",
        "ModelOutput",
        "ModelInstanceGroup",
        "ModelDynamicBatching",
        "ModelStatistics",
    ]
    names += ["InferParameter", "InferTensorContents", "InferStatistics", "InferBatchStatistics", "StatisticDuration"]
    assert sum(compare(protocol().message(name).DESCRIPTOR, theirs[name]) for name in names) > 60
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for method in protocol().methods["GRPCInferenceService"]:
        assert (service[method.name].input_type.name, service[method.name].output_type.name) == (
            method.request,
            method.response,
        )
