"""A deployment map as an application of Ray Serve, as ``gpuprof export --to ray-serve`` configures it.

Each node of the map is a deployment whose single actor runs ``gpuprof serve --node`` on the machine that Ray starts it
on.
A router in front of them divides the requests for a model among its nodes as planned in the map.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gpuprof.domain.deployment import DeploymentMap, Node, PublicName, read_map
from gpuprof.errors import InputError, UnavailableError
from gpuprof.export.bundle import is_cpu
from gpuprof.export.ray_serve import MAX_REQUESTS, ROUTER, deployment_names
from gpuprof.machine.gpu_share import VISIBLE
from gpuprof.pipeline.arguments import locate_files
from gpuprof.pipeline.serve import MapServer, ServeSettings, serve

#: Headers of the connection rather than of its content (RFC 9110, 7.6.1), and headers that the next hop sets itself.
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}

Answer = tuple[int, dict[str, str], bytes]


def build_application(arguments: Mapping[str, str]) -> Any:
    """Return the Ray Serve application of a map.

    Raises `InputError` when there is no such map. ``arguments``: ``map``: path of the map, which every machine must
    have; ``simulate``: ``"true"`` does not run the models.
    """
    from ray import serve as ray_serve

    if "map" not in arguments:
        raise InputError("the application has no map", "write args: {map: /path/of/map.json} in serve_config.yaml")
    path, simulate = arguments["map"], str(arguments.get("simulate", "")).lower() == "true"
    deployment = read_map(Path(path))
    names = deployment_names(deployment)
    nodes = {
        node: ray_serve.deployment(name=name, max_ongoing_requests=MAX_REQUESTS)(RayServeNode).bind(
            path, node, simulate
        )
        for node, name in names.items()
    }
    router = ray_serve.deployment(name=ROUTER, max_ongoing_requests=MAX_REQUESTS)(RayServeRouter)
    return router.bind(weigh_nodes(deployment), nodes)


def weigh_nodes(deployment: DeploymentMap) -> dict[str, dict[str, float]]:
    """Return, for each public model name, the planned requests per second of each node."""
    weights: dict[str, dict[str, float]] = {}
    for node, _, _, replica in deployment.places():
        for client in [name for name, model in deployment.serving.items() if model == replica.model]:
            public = PublicName.of(client, deployment.requested[client].path)
            for name in (public.name, f"{public.name}/{public.version}"):
                of_name = weights.setdefault(name, {})
                of_name[node.name] = of_name.get(node.name, 0.0) + replica.rate_rps
    return weights


def assign_gpus(node: Node, gpu_ids: list[str]) -> Node:
    """Return the node with the numbers of the GPUs that Ray gave its actor.

    Raises `UnavailableError` when Ray gave too few, or names them by other than their numbers.
    """
    boards = [gpu for gpu in node.gpus if not is_cpu(gpu) and not gpu.device.startswith("sim:")]
    if len(gpu_ids) < len(boards):
        raise UnavailableError(
            f"Ray gave node {node.name} {len(gpu_ids)} GPUs and the map has {len(boards)} there",
            "keep num_gpus of serve_config.yaml as gpuprof export wrote it",
        )
    if boards and not all(number.isdigit() for number in gpu_ids):
        raise UnavailableError(f"Ray names its GPUs {', '.join(gpu_ids)}", f"start Ray without {VISIBLE}")
    numbers = dict(zip((gpu.index for gpu in boards), map(int, gpu_ids), strict=False))
    gpus = tuple(gpu.model_copy(update={"index": numbers[gpu.index]}) if gpu in boards else gpu for gpu in node.gpus)
    return node.model_copy(update={"gpus": gpus})


class RayServeNode:
    """The actor of a node: runs a server for its part of the map in child processes, and forwards requests to it."""

    def __init__(self, map_file: str, node: str, simulate: bool) -> None:
        import ray

        gpu_ids = [str(gpu) for gpu in ray.get_gpu_ids()]
        os.environ.pop(VISIBLE, None)  # the map tells GPUs by their numbers on the machine
        path = Path(map_file)
        plan = read_map(path)
        nodes = tuple(host if simulate or host.name != node else assign_gpus(host, gpu_ids) for host in plan.nodes)
        node_map = locate_files(plan.model_copy(update={"nodes": nodes}), path.absolute().parent)
        self._until_end = ExitStack()
        settings = ServeSettings(port=0, node=node, simulate=simulate, max_body_mb=ServeSettings().buffer_mb)
        self._server: MapServer = self._until_end.enter_context(serve(node_map, settings))
        self._session: Any = None

    async def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Return the status, the headers and the body of the server's answer to a request."""
        import aiohttp

        if self._session is None:  # within the loop of the requests
            # No limit here: Ray Serve limits concurrent requests, and aiohttp's own 100 connections would be a second
            # limit.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=None)
        async with self._session.request(method, self._server.url + path, headers=headers, data=body or None) as got:
            return got.status, _drop_hop_by_hop(got.headers), await got.read()

    def check_health(self) -> None:
        """Report to Ray Serve whether the server lives: Ray Serve replaces the actor of a dead server.

        Raises `UnavailableError` when the server's process has ended.
        """
        if not Path(f"/proc/{self._server.pid}").exists():
            raise UnavailableError(f"the server of process {self._server.pid} has gone")

    def __del__(self) -> None:
        """End the server, when Ray Serve stops the actor in order."""
        self._until_end.close()


class RayServeRouter:
    """Router of the application: picks the node of a request by the planned rates of its model."""

    def __init__(self, weights: dict[str, dict[str, float]], nodes: dict[str, Any]) -> None:
        self._weights, self._nodes = weights, nodes
        self._credit: dict[str, dict[str, float]] = {name: dict.fromkeys(of, 0.0) for name, of in weights.items()}

    async def __call__(self, request: Any) -> Any:
        """Return a node's answer to a request for a model, or the worst answer of all nodes to a health request."""
        from starlette.responses import JSONResponse, Response

        # Path as the client wrote it: names may hold an escaped slash.
        path = request.scope.get("raw_path", request.url.path.encode()).decode("ascii").partition("?")[0]
        query = f"?{request.url.query}" if request.url.query else ""
        call = (request.method, path + query, _drop_hop_by_hop(request.headers), await request.body())
        if path.startswith("/v2/health/"):
            answers = await asyncio.gather(*(node.answer.remote(*call) for node in self._nodes.values()))
            # The worst: the whole is ready when all nodes are.
            return _make_response(Response, max(answers, key=lambda answer: answer[0]))
        if path in ("/v2", "/v2/"):
            return _make_response(Response, await next(iter(self._nodes.values())).answer.remote(*call))
        node = self.pick_node(path)
        if node is None:
            models = ", ".join(sorted(name for name in self._weights if "/" not in name))
            return JSONResponse({"error": f"no node answers {path}: ask for /v2/models/ and one of {models}"}, 404)
        return _make_response(Response, await self._nodes[node].answer.remote(*call))

    def pick_node(self, path: str) -> str | None:
        """Return the node for a path below ``/v2/models/``; None where no node has the model.

        Smooth weighted round-robin: no node gets two successive requests while another is due.
        """
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] != ["v2", "models"] or len(parts) < 3:
            return None
        name = f"{parts[2]}/{parts[4]}" if parts[3:4] == ["versions"] and len(parts) > 4 else parts[2]
        if (weights := self._weights.get(name)) is None:
            return None
        credit = self._credit[name]
        for node, weight in weights.items():
            credit[node] += weight
        picked = max(credit, key=lambda node: credit[node])
        credit[picked] -= sum(weights.values())
        return picked


def _drop_hop_by_hop(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _make_response(kind: Any, answer: Answer) -> Any:
    status, headers, body = answer
    return kind(content=body, status_code=status, headers=headers)
