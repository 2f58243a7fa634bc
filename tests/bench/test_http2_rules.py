"""The port of gRPC keeps every rule of HTTP/2 that grpcio's own server keeps."""

from __future__ import annotations

from bench.http2_rules import compare, frame, keeps, rules
from bench.serving import grpc_echo, grpc_server
from tests.reruns import serves_in_real_time


def test_a_frame_is_written_as_rfc_9113_has_it() -> None:
    assert frame(6, 1, 0, b"12345678") == b"\0\0\x08\6\1\0\0\0\0" + b"12345678"


@serves_in_real_time
def test_ours_keeps_what_the_stack_beneath_it_keeps() -> None:
    with grpc_server("null:4", 1) as (_, _, ours), grpc_echo() as (_, bare):
        found = compare(ours, bare)
    assert len(found) == len(rules())
    assert not [rule.name for rule, own, other in found if keeps(rule, other) and not keeps(rule, own)]
    assert sum(keeps(rule, own) for rule, own, _ in found) > len(found) / 2
