from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import gpuprof.serving.protocol as package
from gpuprof.serving.protocol.open_inference import message_class, protocol_pool, service_methods

FOLDER = Path(package.__file__).parent


def test_the_descriptor_is_what_the_source_compiles_to(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    compiled = tmp_path / "compiled.binpb"
    assert protoc.main(["", f"-I{FOLDER}", f"--descriptor_set_out={compiled}", "open_inference.proto"]) == 0
    (ours,) = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "open_inference.binpb").read_bytes()).file
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    assert ours == fresh


def test_what_is_not_left_out_of_the_protocol_is_numbered_as_in_tritons_own_messages() -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    file = descriptor_pb2.FileDescriptorProto()
    protocol_pool().FindFileByName("open_inference.proto").CopyToProto(file)
    for message in file.message_type:
        theirs = getattr(service_pb2, message.name, None) or getattr(model_config_pb2, message.name)
        message_type = message_class(message.name).DESCRIPTOR
        for field in message_type.fields:
            assert field.number == theirs.DESCRIPTOR.fields_by_name[field.name].number
            assert field.type == theirs.DESCRIPTOR.fields_by_name[field.name].type


def test_every_call_has_its_messages() -> None:
    methods = {method.name: method for method in service_methods()}
    assert methods["ModelStreamInfer"].client_streaming and methods["ModelStreamInfer"].server_streaming
    assert not methods["ModelInfer"].client_streaming
    assert methods["ModelInfer"].input_type.name == "ModelInferRequest"
