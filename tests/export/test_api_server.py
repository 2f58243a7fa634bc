"""An API server of Kubernetes takes what ``gpuprof export`` writes, and keeps all of it; no cluster is needed.

``GPUPROF_APISERVER`` and ``GPUPROF_ETCD`` name the programs kube-apiserver and etcd, ``GPUPROF_CRDS`` a folder with the
CRDs of what the server lacks: InferenceService, and before Kubernetes 1.34 ResourceClaimTemplate. A server of nothing
but CRDs (apiextensions-apiserver) is given the objects that it knows.
"""

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_server
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import trustme
import yaml

from gpuprof.export.kubernetes import ALLOCATIONS, DRA, FRACTIONAL, KSERVE
from gpuprof.export.targets import export
from tests.export.test_export import MAP, awkward, merged_map
from tests.export.test_manifests import odd_map, shared_map

_VARIABLES = ("GPUPROF_APISERVER", "GPUPROF_ETCD", "GPUPROF_CRDS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(os.environ.get, _VARIABLES)), reason=f"needs {', '.join(_VARIABLES)}"),
]
Manifest = dict[str, Any]
Ask = Callable[..., Manifest]


def _find_port() -> int:
    with create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Start the server, and return its client: a function of a path and of what is applied there, if anything."""
    binary, etcd, crds = (os.environ[name] for name in _VARIABLES)
    home, port = tmp_path_factory.mktemp("server"), _find_port()
    store, peers = (f"http://127.0.0.1:{_find_port()}" for _ in range(2))
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(home / "pem")
    authority.configure_trust(context)
    (home / "tokens").write_text("the-token,admin,admin,system:masters\n")
    flags = f"""--etcd-servers={store} --bind-address=127.0.0.1 --secure-port={port} --authorization-mode=RBAC
        --tls-cert-file={home}/pem --tls-private-key-file={home}/pem --cert-dir={home} --token-auth-file={home}/tokens
        --service-account-signing-key-file={home}/pem --service-account-key-file={home}/pem
        --service-account-issuer=https://127.0.0.1 --service-cluster-ip-range=10.0.0.0/24"""
    urls = f"--listen-client-urls={store} --advertise-client-urls={store} --listen-peer-urls={peers}"

    def call(path: str, content: Manifest | None = None) -> Manifest:
        method, kind = ("GET", "json") if content is None else ("PATCH", "apply-patch+yaml")
        headers = {"Authorization": "Bearer the-token", "Content-Type": f"application/{kind}"}
        data = None if content is None else json.dumps(content).encode()
        request = Request(f"https://127.0.0.1:{port}{path}", data=data, headers=headers, method=method)
        try:
            with urlopen(request, context=context, timeout=60) as answer:
                return dict(json.load(answer))
        except HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from error

    with (home / "log").open("w") as log:
        commands = ([etcd, f"--data-dir={home}/etcd", *urls.split()], [binary, *flags.split()])
        processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    try:
        assert _serves(call, "/apis/apiextensions.k8s.io/v1", 300), (home / "log").read_text()
        for path in Path(crds).glob("*.yaml"):
            crd = yaml.load(path.read_text(), yaml.CSafeLoader)
            root = f"/apis/{crd['spec']['group']}/{crd['spec']['versions'][0]['name']}"
            if not _serves(call, root):
                _apply(call, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
                assert _serves(call, root, 300)
        yield call
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def _serves(ask: Ask, root: str, tries: int = 1) -> bool:
    """Return whether the server has this API, or comes to have it."""
    for _ in range(tries):
        try:
            return bool(ask(root)["resources"])
        except (AssertionError, URLError):
            time.sleep(0.2 if tries > 1 else 0.0)
    return False


_MAPS = {"plain": MAP, "awkward": awkward(), "merged": merged_map(), "odd": odd_map(), "shares": shared_map(99.5, 0.5)}


def _list_known(ask: Ask, target: str, name: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the manifests of an export that the server knows, with the paths of their collections."""
    bundle = export(_MAPS[name], target, "registry.example/gpuprof:1")
    (text,) = (content for file, content in bundle.files.items() if file.endswith(".yaml"))
    space = f"export-{time.monotonic_ns()}"
    lacks_claims = target == DRA and int(ask("/version")["gitVersion"].split(".")[1]) < 34
    if is_whole := _serves(ask, "/apis/apps/v1"):
        _apply(ask, "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    for manifest in yaml.safe_load_all(text):
        root = f"/apis/{manifest['apiVersion']}".replace("/apis/v1", "/api/v1")
        if (is_whole or _serves(ask, root)) and not (lacks_claims and manifest["kind"] == "Deployment"):
            yield f"{root}/namespaces/{space}/{manifest['kind'].lower()}s", manifest


def _lay_over(stored: Any, sent: Any) -> Any:
    """Return what was stored with what was sent in its place: the same, if nothing of it was dropped or changed."""
    if isinstance(sent, dict) and isinstance(stored, dict):  # the server leaves out what is empty
        return stored | {key: _lay_over(stored.get(key), value) for key, value in sent.items() if value not in ({}, [])}
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        return [_lay_over(old, new) for old, new in zip(stored, sent, strict=True)]
    return sent


def _apply(ask: Ask, path: str, manifest: Manifest, query: str = "") -> Manifest:
    flags = f"fieldManager=gpuprof&force=true&fieldValidation=Strict{query}"
    return ask(f"{path}/{manifest['metadata']['name']}?{flags}", manifest)


def _check(ask: Ask, path: str, manifest: Manifest) -> None:
    """Apply the object after a dry run, and again; nothing of it is refused, dropped or changed."""
    _, stored, again = (_apply(ask, path, manifest, query) for query in ("&dryRun=All", "", ""))
    is_kept = _lay_over(stored, manifest) == stored
    assert is_kept, f"not all was kept of {manifest}: {stored}"
    assert stored["metadata"].get("generation") == again["metadata"].get("generation")


@pytest.mark.parametrize("name", _MAPS)
@pytest.mark.parametrize("target", [*ALLOCATIONS, KSERVE])
def test_the_server_takes_every_object_and_keeps_every_field(ask: Ask, target: str, name: str) -> None:
    if target in FRACTIONAL and name == "awkward":
        pytest.skip("a CPU has no fractions")
    known = list(_list_known(ask, target, name))
    for number, (path, manifest) in enumerate(known):
        _check(ask, path, manifest)
        with pytest.raises(AssertionError, match="nonsense"):
            _check(ask, path, manifest | {"metadata": {"name": f"other-{number}"}, "nonsense": 1})
    if not known:
        pytest.skip("a server of nothing but CRDs, and this target has none")
