"""No client ever sees a byte of another: the memory of an answer is given back when the transport has let go of it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, map_of, replica, running
from tests.serving.strange_clients import MANNERS, ClientRequest, Endpoint, send_all

pytestmark = serves_in_real_time

TOKEN = "a-token-of-the-tests-0123456789"
#: Name, path and bytes of a row: in the message, in the arena, and more than a socket's buffer takes.
MODELS = (("little", "null:4k", 4000), ("large", "null:600k", 600_000), ("huge", "null:8m", 8_000_000))


def addresses(server: RunningServer) -> dict[str, tuple[str, int]]:
    """Return host and port by scheme."""
    words = [word.split("://") for word in server.line.split() if "://" in word]
    return {scheme: (where.rsplit(":", 1)[0], int(where.rsplit(":", 1)[1])) for scheme, where in words}


def count_buffered(server: RunningServer) -> float:
    """Return the bytes that requests and answers hold."""
    lines = server.get("/metrics")[1].decode().splitlines()
    return float(next(line for line in lines if line.startswith("gpuprof_buffer_bytes ")).split()[1])


@dataclass(frozen=True)
class Servers:
    """A server by HTTP and gRPC, and one with TLS and a token."""

    plain: RunningServer
    secured: RunningServer
    endpoints: tuple[Endpoint, ...]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("servers")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = [directory / name for name in ("chain.pem", "key.pem", "token")]
    certificate.cert_chain_pems[0].write_to_path(files[0])
    certificate.private_key_pem.write_to_path(files[1])
    files[2].write_text(TOKEN)
    for file in files[1:]:
        file.chmod(0o600)
    guards = ["--tls-cert", str(files[0]), "--tls-key", str(files[1]), "--token-file", str(files[2])]
    document = map_of(
        {name: path for name, path, _ in MODELS}, [replica(name, sm_share_pct=30.0) for name, _, _ in MODELS], 60_000.0
    )
    for name in ("plain", "secured"):
        (directory / name).mkdir()
    options = ("--grpc-port", "0", "--buffer-mb", "1024")
    with (
        running(directory / "plain", document, *options) as plain,
        running(directory / "secured", document, *options, *guards) as secured,
    ):
        secured.token, secured.context = TOKEN, ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        pem = authority.cert_pem.bytes().decode()
        endpoints = [Endpoint(scheme, *where) for scheme, where in addresses(plain).items()]
        endpoints += [Endpoint(scheme, *where, pem, TOKEN) for scheme, where in addresses(secured).items()]
        yield Servers(plain, secured, tuple(endpoints))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_client_finds_a_byte_that_is_not_its_own_whatever_others_do(servers: Servers, data: st.DataObject) -> None:
    one = st.builds(
        ClientRequest,
        st.sampled_from(servers.endpoints),
        st.sampled_from(MANNERS),
        st.just(""),
        st.just(0),
        mark=st.integers(1, 200),
    )
    drawn = data.draw(st.lists(st.tuples(one, st.sampled_from(MODELS)), min_size=8, max_size=40))
    requests = [replace(request, model=name, row_bytes=size) for request, (name, _, size) in drawn]
    got = send_all(requests, at_once=16)
    assert (got.foreign, got.refused) == (0, 0)
    assert got.answers >= sum(request.manner in ("reads", "reads slowly") for request in requests)
    assert eventually(lambda: count_buffered(servers.plain) == count_buffered(servers.secured) == 0)
