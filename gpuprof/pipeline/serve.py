"""``serve``: run a deployment map on this machine, and plan it again for its load.

`gpuprof.serve` runs this module as a program, ``python -m gpuprof.pipeline.serve DESCRIPTOR``: it reads a line of JSON
on stdin, writes a line to the descriptor, its addresses or the error, and serves until stdin ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, read_map, write_map
from gpuprof.domain.fleet import Fleet
from gpuprof.domain.plural import count_of
from gpuprof.domain.validation import Count, Port, Positive
from gpuprof.errors import GpuprofError, InfeasibleError, InputError, UnavailableError, UnstableError
from gpuprof.pipeline.arguments import MapArgument, PathArgument, locate_files, map_folder, resolve_map
from gpuprof.pipeline.result import NoteCallback, Result, say_nothing
from gpuprof.pipeline.settings import Settings, option
from gpuprof.runtime.module_command import module_command
from gpuprof.serving.change.adapt import AdaptSettings, Load
from gpuprof.serving.control import send_apply
from gpuprof.serving.plan.serving_plan import MapSource
from gpuprof.serving.server import Ready


@dataclass(frozen=True, slots=True)
class MapReplanner:
    """Planner of maps for a measured load, with the policy and the settings of the present map."""

    base: Path  #: Directory of the first map, in which the files of its models are looked for.
    db: Path | None  #: Kernel database.
    #: Whether a fleet without a count may grow; otherwise the devices of the first map are the limit.
    more_devices: bool
    first: DeploymentMap  #: Its machines are the available ones: a shrunk map grows onto them again, by their names.
    estimator: str | None = None  #: Name of another estimator than the map was planned with.

    def __call__(self, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
        """Return a map for the load, or for the part of it that the devices can serve.

        None when this part does not exceed the rates of the present map. Raises `GpuprofError` when the database lacks
        a model or a device.
        """
        # A server that never plans does not load the planner.
        from gpuprof.estimators.builtin import CorrectedEstimator
        from gpuprof.pipeline.problem import plan_map
        from gpuprof.pipeline.recorded_problem import restore_policy, restore_problem

        problem = restore_problem(locate_files(deployment, self.base), self.db, estimator=self.estimator)
        settings = deployment.planned_with
        if self.estimator is not None:
            settings = settings.model_copy(update={"estimator": self.estimator})
        fleet = problem.fleet if self.more_devices else _fix_counts(problem.fleet, self.first)
        estimator = CorrectedEstimator(problem.estimator, load.slowdowns, load.beside)
        problem = replace(problem, fleet=fleet, estimator=estimator, planned_with=settings, previous=deployment)
        policy = restore_policy(deployment)
        fraction = 1.0
        for _ in ("the whole load", "the part that was served of it"):
            rates = {name: fraction * rate for name, rate in load.rates_rps.items()}
            # A part of the load within the present map's planned rates is not worth a change.
            if fraction < 1.0 and not load.slowdowns and not load.beside and not _exceeds_plan(deployment, rates, load):
                return None
            demands = tuple(replace(demand, rate_rps=rates[demand.model]) for demand in problem.demands)
            try:
                plan = plan_map(replace(problem, demands=demands), policy)
            except InfeasibleError:
                return None
            if not plan.unplaced:
                return _move_to_known_gpus(plan, deployment, self.first)
            fraction = min(1.0 - demand.rate_rps / rates[demand.model] for demand in plan.unplaced)
            if fraction <= 0.0:
                return None
        return None


def check_adaptable(
    deployment: DeploymentMap,
    db: Path | None,
    node: str | None,
    note: NoteCallback = say_nothing,
    estimator: str | None = None,
) -> None:
    """Check at the start, rather than when the load changes, that a map can be replanned.

    Raises `InputError` when this process serves a single node of several, or the database lacks a model or a device of
    the map.
    """
    from gpuprof.pipeline.recorded_problem import restore_problem

    if node is not None and len(deployment.nodes) > 1:
        raise InputError("--adapt and --node exclude each other: a plan is for all nodes")
    problem = restore_problem(deployment, db, note, estimator)
    for demand in problem.demands:
        for entry in problem.fleet.entries:
            problem.estimator.shares(demand.model, entry.device)


def _fix_counts(fleet: Fleet, deployment: DeploymentMap) -> Fleet:
    """Return the fleet with its own device counts, or the map's counts where the fleet gives none."""
    names = [gpu.device for node in deployment.nodes for gpu in node.gpus]
    entries = tuple(
        entry if entry.count is not None else replace(entry, count=max(1, names.count(entry.device.name)))
        for entry in fleet.entries
    )
    return replace(fleet, entries=entries)


def _move_to_known_gpus(plan: DeploymentMap, now: DeploymentMap, first: DeploymentMap) -> DeploymentMap:
    """Move replicas on GPUs that exist in neither map to free GPUs of the first map, since no others exist."""
    kinds = {(name, gpu.index): gpu.device for name, gpu in (*_list_gpus(first), *_list_gpus(now))}
    stays = {(name, gpu.index) for name, gpu in _list_gpus(plan) if kinds.get((name, gpu.index)) == gpu.device}
    free = [place for place in kinds if place not in stays]
    nodes: dict[str, list[Gpu]] = {}
    for name, gpu in _list_gpus(plan):
        place = None if (name, gpu.index) in stays else next((slot for slot in free if kinds[slot] == gpu.device), None)
        if place is not None:
            free.remove(place)
            name, gpu = place[0], gpu.model_copy(update={"index": place[1]})
        nodes.setdefault(name, []).append(gpu)
    ordered = {name: tuple(sorted(gpus, key=lambda gpu: gpu.index)) for name, gpus in nodes.items()}
    return plan.model_copy(update={"nodes": tuple(Node(name=name, gpus=gpus) for name, gpus in ordered.items())})


def _list_gpus(deployment: DeploymentMap) -> Iterator[tuple[str, Gpu]]:
    return ((node.name, gpu) for node in deployment.nodes for gpu in node.gpus)


def _exceeds_plan(deployment: DeploymentMap, rates: Mapping[str, float], load: Load) -> bool:
    """Return whether some model's load, and the part of it that can be served, exceed its planned rate."""
    return any(
        rates[name] > model.rate_rps and load.rates_rps[name] > model.rate_rps
        for name, model in deployment.models.items()
    )


#: Address for --public.
_ANY_ADDRESS = "0.0.0.0"
_ERRORS: dict[str, type[GpuprofError]] = {
    kind.__name__: kind for kind in (InputError, InfeasibleError, UnstableError, UnavailableError)
}


_LISTENING, _WORKERS, _LIMITS = "Address and routing", "Workers", "Limits of memory and time"
_ADAPTATION, _SECURITY, _TELEMETRY = "Adaptation to load", "Authentication, TLS and edge", "Traces and log"


class ServeSettings(Settings):
    """Address, limits, adaptation and security of a server.

    Raises `InputError` when a request may be larger than all memory for tensors, or HTTP and gRPC are to share a port.
    """

    host: str = option("127.0.0.1", "Address to listen on.", panel=_LISTENING)
    port: Port = option(8000, "HTTP port; 0 takes any free one.", panel=_LISTENING)
    grpc_port: Port | None = option(None, "gRPC port; 0 takes any free one; default: no gRPC.", panel=_LISTENING)
    node: str | None = option(None, "Node of the map that this machine is.", panel=_WORKERS)
    simulate: bool = option(
        False, "Simulate the models: each batch takes the time predicted in the map.", panel=_WORKERS
    )
    engine: Literal["local", "ray"] = option(
        "local",
        "Place of the workers: local, or ray for the nodes of the Ray cluster at RAY_ADDRESS.",
        panel=_WORKERS,
    )
    apply_mig: bool = option(
        False, "Partition GPUs into the map's MIG instances; restore the old layout on exit.", panel=_WORKERS
    )
    allow_changed: bool = option(False, "Serve model files that changed since the map was planned.", panel=_WORKERS)
    buffer_mb: Count = option(1024, "Memory in MiB for the tensors of all requests in progress.", panel=_LIMITS)
    max_body_mb: Count = option(64, "Largest inference request, in MiB.", panel=_LIMITS)
    hang_s: Positive = option(5.0, "Time after which a silent worker is replaced.", unit="s", panel=_LIMITS)
    max_connections: Count = option(16_384, "Maximum number of client connections.", panel=_LIMITS)
    shadow: bool = option(
        False, "Keep standbys with a larger share, for models whose p99 exceeds the SLO.", panel=_ADAPTATION
    )
    adapt: bool = option(
        False,
        "Plan a new map when rates or latencies deviate from the plan; write it to MAP.adapted.json.",
        panel=_ADAPTATION,
    )
    adapt_period_s: Positive = option(
        5.0, "Time over which --adapt measures.", "--adapt-period", unit="s", panel=_ADAPTATION
    )
    db: Path | None = option(None, "Kernel database, for --adapt.", panel=_ADAPTATION)
    estimator: str | None = option(None, "Estimator for the plans of --adapt; default: the map's.", panel=_ADAPTATION)
    token_file: Path | None = option(
        None, "File with the token that clients must send; default: GPUPROF_TOKEN.", panel=_SECURITY
    )
    public: bool = option(False, "Listen on every address, behind the edge; needs a token and TLS.", panel=_SECURITY)
    envoy: Path | None = option(
        None, "Envoy binary, for gRPC, TLS and --public; default: that of the extra edge.", panel=_SECURITY
    )
    tls_cert: Path | None = option(None, "Certificate chain (PEM), to serve https and grpcs.", panel=_SECURITY)
    tls_key: Path | None = option(None, "Private key of the certificate (PEM).", panel=_SECURITY)
    insecure: bool = option(False, "Accept clients on other machines without a token or TLS.", panel=_SECURITY)
    otlp: str | None = option(
        None, "Send OpenTelemetry traces to this collector, http://HOST:4318.", metavar="URL", panel=_TELEMETRY
    )
    log: Literal["text", "json"] = option("text", "Form of the log on stderr: text or json.", panel=_TELEMETRY)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.buffer_mb < self.max_body_mb:
            raise InputError(
                f"--buffer-mb must be at least --max-body-mb but got {self.buffer_mb} and {self.max_body_mb}"
            )
        if self.port and self.port == self.grpc_port:
            raise InputError(f"--port and --grpc-port are both {self.port}", "give them different ports")
        return self


@dataclass(frozen=True, slots=True)
class MapServer:
    """A server that runs in child processes.

    Attributes
    ----------
    url : str
        HTTP address, ``http://127.0.0.1:8000``.
    grpc_url : str or None
        gRPC address; None without gRPC.
    port : int
        HTTP port.
    map : DeploymentMap
        The map at its start.
    models, workers : int
        Numbers of models and of workers.
    pid : int
        Process id of its first process.
    """

    url: str
    grpc_url: str | None
    port: int
    map: DeploymentMap
    models: int
    workers: int
    pid: int

    def apply(self, map_file: PathArgument) -> ApplyResult:
        """Move the server to the map in a file; no request is lost.

        Raises `GpuprofError` as `gpuprof.pipeline.serve.apply`.
        """
        return apply(map_file, port=self.port)


def run_map_server(
    map_file: PathArgument, settings: ServeSettings, ready: Ready, note: NoteCallback = say_nothing
) -> None:
    """Serve a map in this process until SIGINT or SIGTERM; then answer the pending requests.

    This must be the main thread. Raises `GpuprofError` when the map cannot be served with the settings, the port is
    taken, or a worker cannot start. ``ready``: called once with the addresses and the numbers of models and workers;
    ``note``: called with each remark immediately.
    """
    from gpuprof.serving.engine import RayEngine
    from gpuprof.serving.plan.serving_plan import SHADOW_PCT, Planner
    from gpuprof.serving.server import run_server
    from gpuprof.serving.server_settings import ServerSettings
    from gpuprof.serving.transport.security import check_exposure, is_loopback, server_security
    from gpuprof.serving.watch.logs import configure_logging
    from gpuprof.serving.watch.statistics import otlp_tracer

    path, is_clustered = Path(map_file), settings.engine == "ray"
    configure_logging(settings.log)
    source = MapSource.read_map(path)
    planner = Planner(
        f"serve-{os.getpid()}",
        settings.node,
        settings.simulate,
        SHADOW_PCT if settings.shadow else 0.0,
        cluster=is_clustered,
        apply_mig=settings.apply_mig,
        allow_changed=settings.allow_changed,
    )
    security = server_security(settings.token_file, settings.tls_cert, settings.tls_key)
    host = _ANY_ADDRESS if settings.public and is_loopback(settings.host) else settings.host
    check_exposure(host, security, settings.insecure)
    unchanged = ("port", "grpc_port", "hang_s", "max_connections", "public", "shadow")
    server_settings = ServerSettings(
        host=host,
        envoy=settings.envoy,
        **{name: getattr(settings, name) for name in unchanged},
        buffer_bytes=settings.buffer_mb << 20,
        max_body_bytes=settings.max_body_mb << 20,
        security=security,
        tracer=None if settings.otlp is None else otlp_tracer(settings.otlp),
        adapt=_plan_adaptation(source, path, settings, note) if settings.adapt else None,
    )
    run_server(
        source, planner, server_settings, ready, RayEngine(security, settings.insecure) if is_clustered else None
    )


def _plan_adaptation(source: MapSource, path: Path, settings: ServeSettings, note: NoteCallback) -> AdaptSettings:
    """Return the settings of ``--adapt``: the planner, the file for its maps, and the period."""
    located = locate_files(source.deployment, path.absolute().parent)
    check_adaptable(located, settings.db, settings.node, note, settings.estimator)
    replan = MapReplanner(path.absolute().parent, settings.db, settings.simulate, source.deployment, settings.estimator)
    return AdaptSettings(replan, path.with_suffix(".adapted.json"), period_s=settings.adapt_period_s)


@contextmanager
def serve(
    deployment: MapArgument = Path("map.json"),
    settings: ServeSettings = ServeSettings(),  # noqa: B008 - frozen
    *,
    note: NoteCallback = say_nothing,
) -> Iterator[MapServer]:
    """Serve a map in child processes while the context lasts; on exit pending requests are answered.

    Raises `GpuprofError` when the map cannot be served with the settings, the port is taken, or a worker cannot start.

    Parameters
    ----------
    deployment : path or DeploymentMap
        Relative paths of model files start at the folder of the map's file, or at the current folder.
    settings : ServeSettings
        ``ServeSettings(port=0)`` takes any free port, ``simulate=True`` does not run the models.

    Yields
    ------
    MapServer
        The server, ready: every model is loaded.

    Notes
    -----
    The server logs to this process's stderr. It ends with this process, even after a crash.

    Examples
    --------
    >>> from urllib.request import urlopen
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0, simulate=True)) as server:
    ...     urlopen(f"{server.url}/v2/health/ready").status, server.workers
    (200, 1)
    """
    from gpuprof.serving.server_settings import ServerSettings

    resolved = resolve_map(deployment)
    with tempfile.TemporaryDirectory(prefix="gpuprof-serve-") as folder:
        path = Path(folder) / "map.json"
        if isinstance(deployment, DeploymentMap):
            write_map(locate_files(resolved, map_folder(deployment)), path)
        else:
            path = Path(deployment)
        process, answers = _start(path, settings)
        try:
            server = _await_ready(process, answers, resolved)
            note(
                f"serving {count_of(server.models, 'model')} with {count_of(server.workers, 'worker')} on {server.url}"
            )
            yield server
        finally:
            os.close(answers)
            _end(process, ServerSettings().drain_s + settings.hang_s)


def _start(map_file: Path, settings: ServeSettings) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server; return its process and the descriptor of its message, either readiness or an error."""
    # A separate pipe, since libraries print on stdout.
    answers, answer_writer = os.pipe()
    try:
        process = subprocess.Popen(
            module_command("gpuprof.pipeline.serve", str(answer_writer)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(answer_writer,),
            start_new_session=True,  # keeps Ctrl-C for this process, which then ends the server in order
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )
    except OSError:
        os.close(answers)
        raise
    finally:
        # This process must not hold the writing end: reading would never end when the server dies.
        os.close(answer_writer)
    assert process.stdin is not None
    order = {"map_file": str(map_file.absolute()), "settings": settings.model_dump(mode="json")}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()  # stdin stays open: the server ends when this end closes
    return process, answers


def _await_ready(process: subprocess.Popen[bytes], answers: int, deployment: DeploymentMap) -> MapServer:
    # A duplicate, since closing the file closes its descriptor, which the caller closes itself.
    with os.fdopen(os.dup(answers), "rb") as file:
        line = file.readline()
    if not line:
        raise UnavailableError(f"the server ended before it was ready, with exit code {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise _ERRORS.get(answer["kind"], UnavailableError)(answer["error"], answer["fix"])
    # The text of addresses that `Server` announces: HTTP's address comes first.
    addresses = answer["url"].split(" and ")
    url = addresses[0]
    return MapServer(
        url=url,
        grpc_url=addresses[1] if len(addresses) > 1 else None,
        port=urlsplit(url).port or 0,
        map=deployment,
        models=answer["models"],
        workers=answer["workers"],
        pid=process.pid,
    )


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """End the server and wait for its exit; kill it after ``limit_s`` seconds."""
    assert process.stdin is not None
    with process:
        process.stdin.close()  # the end of stdin ends the server
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass(frozen=True, kw_only=True)
class ApplyResult(Result):
    """The replicas kept, started and stopped by a server, by name, and the reasons why others failed to start."""

    kept: tuple[str, ...]
    started: tuple[str, ...]
    stopped: tuple[str, ...]
    failed: Mapping[str, str]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each replica: its name, whether it was kept, started or stopped or failed, and why."""
        changes = {"kept": self.kept, "started": self.started, "stopped": self.stopped, "failed": self.failed}
        return [
            {"replica": name, "change": change, "reason": self.failed.get(name) if change == "failed" else None}
            for change, names in changes.items()
            for name in names
        ]


def apply(map_file: PathArgument, *, port: int = ServeSettings().port) -> ApplyResult:
    """Move the server on this machine to another map: only changed replicas start and stop, no request is lost.

    A model that cannot be loaded keeps its running replicas; the others are moved. Raises `UnavailableError` when no
    server of this user listens on the port, or the server lacks a resource that the map needs; `InputError` when the
    file holds no map, or the server refuses the map.

    Parameters
    ----------
    map_file : path
        The map to serve from now on; relative paths of model files start at its folder.
    port : int
        HTTP port of the server.
    """
    path = Path(map_file)
    # Read the map here, too, so that errors in the file are reported without a request to the server.
    read_map(path)
    answer = send_apply(port, path)
    replicas = {change: tuple(answer[change]) for change in ("kept", "started", "stopped")}
    return ApplyResult(**replicas, failed=answer["failed"])


def _run_process(descriptor: int) -> int:
    """Serve until stdin ends; return the exit code."""
    os.set_inheritable(descriptor, False)  # a worker that outlives this process would keep it open
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_await_end, daemon=True).start()

    def ready(url: str, models: int, workers: int) -> None:
        _tell(descriptor, {"url": url, "models": models, "workers": workers})

    try:
        run_map_server(order["map_file"], ServeSettings(**order["settings"]), ready)
    except GpuprofError as error:
        _tell(descriptor, {"error": error.message, "fix": error.fix, "kind": type(error).__name__})
        return error.exit_code
    return 0


def _await_end() -> None:
    """Wait for the end of stdin, then send SIGTERM to this process: its parent has ended or wants it to end."""
    while os.read(sys.stdin.fileno(), 4096):  # not through the buffer: a daemon thread must not hold its lock at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(descriptor: int, answer: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(_run_process(int(sys.argv[1])))
