"""Tokens and TLS: for clients by HTTP and gRPC, and for the machines and workers that come to the rendezvous."""

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import trustme

from gpuprof.errors import InputError, UnavailableError
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target
from gpuprof.serving.transport.rendezvous import Rendezvous, RendezvousKey, join_rendezvous
from gpuprof.serving.transport.security import (
    Security,
    check_exposure,
    client_context,
    is_loopback,
    read_token,
    server_security,
)
from gpuprof.serving.transport.wire import Frame, FrameConnection, FrameKind
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running

pytestmark = serves_in_real_time

TOKEN = "a-token-of-the-tests-0123456789"


@dataclass(frozen=True)
class Papers:
    """Files of a certificate of our own."""

    authority: Path
    chain: Path
    key: Path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    directory = tmp_path_factory.mktemp("papers")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files = Papers(directory / "ca.pem", directory / "chain.pem", directory / "key.pem")
    authority.cert_pem.write_to_path(files.authority)
    certificate.cert_chain_pems[0].write_to_path(files.chain)
    certificate.private_key_pem.write_to_path(files.key)
    files.key.chmod(0o600)
    return files


@pytest.fixture(scope="module")
def server(papers: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("secured")
    token = directory / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    options = ["--token-file", str(token), "--tls-cert", str(papers.chain), "--tls-key", str(papers.key)]
    document = map_of({"m": "null:4", "large": "null:600k"}, [replica("m"), replica("large")])
    with running(directory, document, "--grpc-port", "0", *options) as started:
        started.context = client_context(papers.authority)
        yield started


def test_only_requests_with_the_token_are_answered(server: RunningServer) -> None:
    status, answer = server.get("/v2/models/m")
    assert (status, answer["error"]) == (401, "the request does not have the token of this server")
    assert server.get("/v2/models/m", Authorization=f"Bearer {TOKEN}x")[0] == 401
    assert server.get("/metrics", Authorization=TOKEN)[0] == 401
    assert server.get("/v2/models/m", Authorization=f"bearer {TOKEN}")[0] == 200
    assert server.infer("m", [1.0])[0] == 401


def test_load_brings_token_and_authority(server: RunningServer, papers: Papers) -> None:
    target = Target.parse(server.url, TOKEN, papers.authority)
    streams = [RequestStream("m", 30.0, 60_000.0), RequestStream("large", 10.0, 60_000.0)]
    outcome = run_load(target, streams, LoadSettings(1.0, 0.0, clients=2, patience_s=30.0))
    assert all(result.answered == result.sent > 0 for result in outcome.results)
    with pytest.raises(InputError, match="answers 401"):
        Target.parse(server.url, "", papers.authority).model_inputs("m")
    with pytest.raises(UnavailableError, match="is not trusted"):
        Target.parse(server.url, TOKEN).model_inputs("m")


def test_grpc_asks_for_the_token_in_its_metadata(server: RunningServer, papers: Papers) -> None:
    address = next(word for word in server.line.split() if word.startswith("grpcs://")).removeprefix("grpcs://")
    credentials = triton_grpc.InferenceServerClient(address, ssl=True, root_certificates=str(papers.authority))
    with credentials as client:
        assert client.is_server_live() and client.is_server_ready()
        with pytest.raises(triton_grpc.InferenceServerException, match="does not have the token") as refused:
            client.get_model_metadata("m")
        assert refused.value.status() == str(grpc.StatusCode.UNAUTHENTICATED)
        metadata = {"authorization": f"Bearer {TOKEN}"}
        assert client.get_model_metadata("m", headers=metadata).name == "m"


def test_listening_where_others_can_reach_it_needs_both() -> None:
    both = Security(TOKEN, ssl.create_default_context())
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(host)
        check_exposure(host, Security(), insecure=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(InputError, match="needs a token and TLS"):
            check_exposure(host, Security(), insecure=False)
        with pytest.raises(InputError, match="needs TLS"):
            check_exposure(host, Security(TOKEN), insecure=False)
        check_exposure(host, both, insecure=False)
        check_exposure(host, Security(), insecure=True)


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUPROF_TOKEN", raising=False)
    assert read_token(None) == ""
    monkeypatch.setenv("GPUPROF_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    file = tmp_path / "token"
    for bad in ("", "short", "spaces in the middle of it", "nöt äscii at all, this token"):
        file.write_text(bad)
        file.chmod(0o600)
        with pytest.raises(InputError, match=str(file)):
            read_token(file)
    with pytest.raises(InputError, match="cannot read"):
        read_token(tmp_path / "nowhere")


@pytest.mark.parametrize(("mode", "verb"), [(0o644, "read"), (0o622, "write"), (0o666, "read")])
def test_a_secret_that_others_can_read_or_replace_is_none(papers: Papers, tmp_path: Path, mode: int, verb: str) -> None:
    file, key = tmp_path / "token", tmp_path / "key.pem"
    file.write_text(TOKEN)
    key.write_text(papers.key.read_text())
    for secret in (file, key):
        secret.chmod(mode)
        with pytest.raises(InputError, match=f"every user of this machine can {verb} {secret}") as raised:
            server_security(file, papers.chain, key)
        assert raised.value.fix == f"chmod 600 {secret}"
        secret.chmod(0o640)
    assert server_security(file, papers.chain, key).token == TOKEN


def test_workers_do_not_know_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPROF_TOKEN", TOKEN)
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        assert server.get("/v2/models/m")[0] == 401
        for child in psutil.Process(server.process.pid).children(recursive=True):
            assert "GPUPROF_TOKEN" not in child.environ()


def test_a_certificate_needs_its_own_key(papers: Papers, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="go together"):
        server_security(None, papers.chain, None)
    with pytest.raises(InputError, match="not a certificate and its key"):
        server_security(None, papers.key, papers.chain)
    path = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(path)
    path.chmod(0o640)
    with pytest.raises(InputError, match="not a certificate and its key"):
        server_security(None, papers.chain, path)
    with pytest.raises(InputError, match="holds no certificate"):
        client_context(papers.key)


class RecordingPeer:
    """Somebody whom the rendezvous waits for."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def on_join(self, connection: FrameConnection, hello: dict[str, Any]) -> None:
        self.said.append(hello)
        connection.send(FrameKind.WELCOME, "in")

    def receive(self, frame: Frame) -> None:
        pass

    def on_close(self) -> None:
        pass


def first_answer(key: RendezvousKey, peer: str) -> Any:
    """Return what the rendezvous says to somebody who comes; None when it closes."""
    stream = join_rendezvous(key, peer, {})
    frame = stream.receive()
    stream.close()
    return None if frame is None else frame.head


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_door_lets_in_only_those_it_waits_for_who_know_the_secret(papers: Papers, encrypted: bool) -> None:
    async def scene() -> None:
        rendezvous, peer = Rendezvous(), RecordingPeer()
        security = server_security(None, papers.chain, papers.key) if encrypted else Security()
        key = await rendezvous.open_remote("127.0.0.1", security.context, security.certificate)
        rendezvous.expect("machine:n", peer)
        assert await asyncio.to_thread(first_answer, key, "machine:n") == "in"
        assert await asyncio.to_thread(first_answer, key, "machine:other") is None
        assert await asyncio.to_thread(first_answer, replace(key, secret="00" * 32), "machine:n") is None
        if encrypted:
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                await asyncio.to_thread(first_answer, replace(key, certificate=OTHER), "machine:n")
        assert len(peer.said) == 1
        rendezvous.close()

    asyncio.run(scene())


OTHER = trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].bytes().decode()


def test_a_stranger_that_sends_a_large_frame_is_cut_off() -> None:
    async def scene() -> None:
        rendezvous = Rendezvous()
        key = await rendezvous.open_remote("127.0.0.1")
        _, host, port = key.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes([9, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0]))
        await writer.drain()
        challenge = await asyncio.wait_for(reader.read(), 10.0)  # to the end: the connection is closed
        assert len(challenge) < 200
        writer.close()
        rendezvous.close()

    asyncio.run(scene())
