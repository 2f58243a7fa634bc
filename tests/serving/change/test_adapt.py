"""The map follows the load: when the placer is asked, and that nothing is lost on the way."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.deployment import DeploymentMap, parse_map, read_map
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import Target
from gpuprof.serving.change import adapt
from gpuprof.serving.change.adapt import Adapter, AdaptSettings, Load, Replanner
from gpuprof.serving.change.window import ObservedLoad
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row
from tests.reruns import serves_in_real_time
from tests.serving.change.test_bounds import observe_window
from tests.serving.change.test_shadow import decisions
from tests.serving.running import eventually, map_of, replica, running

pytestmark = serves_in_real_time


def map_for_rate(rate_rps: float, source: str = "") -> DeploymentMap:
    document = map_of({"m": "null:4"}, [replica("m")])
    document["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["predicted"]["source"] = source
    document["models"]["m"]["rate_rps"] = rate_rps
    return parse_map(document, "test")


class Played:
    """A placer and a server that are played by the test."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, finds: bool = True) -> None:
        async def plan_here(replan: Replanner, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
            return replan(deployment, load)

        monkeypatch.setattr(adapt, "plan_aside", plan_here)
        self._finds = finds
        self.source = ""
        self.asked: list[Load] = []
        self.applied: list[float] = []
        self._settings = AdaptSettings(self._plan, tmp_path / "new.json", period_s=0.05)

    def adapter(self, rate_rps: float) -> Adapter:
        return Adapter(Router(Arena(1 << 16)), map_for_rate(rate_rps, self.source), self._settings, self._apply)

    def _plan(self, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
        self.asked.append(load)
        return map_for_rate(load.rates_rps["m"], self.source) if self._finds else None

    async def _apply(self, path: Path) -> dict[str, Any]:
        self.applied.append(read_map(path).models["m"].rate_rps)
        return {"kept": (), "started": ("m/1",), "stopped": ("m/0",)}

    def see(self, rate_rps: float, *periods: ObservedLoad) -> None:
        async def judge() -> None:
            adapter = self.adapter(rate_rps)
            for load in periods:
                await adapter.decide({"m": load})

        asyncio.run(judge())


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_a_rate_that_doubles_is_planned_for_with_headroom(player: Played) -> None:
    player.see(100.0, observe_window(200.0), observe_window(200.0))
    (load,) = player.asked
    assert load.rates_rps["m"] == pytest.approx(240.0)
    assert load.slowdowns == {}
    assert player.applied == pytest.approx([240.0])


def test_after_the_move_the_same_load_is_within_bounds(player: Played) -> None:
    player.see(100.0, *[observe_window(200.0)] * 20)
    assert len(player.asked) == 1


def test_one_period_is_not_enough(player: Played) -> None:
    player.see(100.0, *[observe_window(200.0), observe_window(100.0)] * 10)
    assert player.asked == []


def test_too_little_load_is_borne_for_longer_than_too_much(player: Played) -> None:
    player.see(100.0, *[observe_window(30.0)] * 5)
    assert player.asked == []
    player.see(100.0, *[observe_window(30.0)] * 6)
    assert player.asked[0].rates_rps["m"] == pytest.approx(36.0)


def test_a_model_that_nobody_asks_for_keeps_a_place(player: Played) -> None:
    player.see(100.0, *[observe_window(0.0, None)] * 6)
    assert player.applied == pytest.approx([1.0])


def test_slowdowns_go_to_the_placer_and_add_up(player: Played) -> None:
    player.see(100.0, *[observe_window(100.0, 1.5)] * 2, *[observe_window(100.0, 2.0)] * 2)
    assert [load.slowdowns["m"] for load in player.asked] == pytest.approx([1.5, 3.0])


def beside(load: ObservedLoad, heavy: float) -> ObservedLoad:
    return replace(load, beside={"heavy": heavy})


def test_a_neighbour_that_slows_a_measured_model_is_corrected_as_a_pair(player: Played) -> None:
    player.source = "measured × traffic"
    player.see(100.0, *[beside(observe_window(100.0, 1.5), 1.5)] * 2, *[beside(observe_window(100.0, 1.4), 1.4)] * 2)
    assert [dict(load.slowdowns) for load in player.asked] == [{}, {}]
    assert [load.beside["m", "heavy"] for load in player.asked] == pytest.approx([1.5, 2.1])


def test_times_that_were_only_predicted_are_corrected_themselves(player: Played) -> None:
    player.source = "learned"
    player.see(100.0, *[beside(observe_window(100.0, 1.8), 1.8)] * 2)
    (load,) = player.asked
    assert (load.slowdowns, load.beside) == ({"m": 1.8}, {})


def test_that_a_model_is_quick_beside_idle_neighbours_makes_no_pair_quick(player: Played) -> None:
    player.source = "measured"
    player.see(100.0, *[beside(observe_window(100.0, 0.5), 0.5)] * 6)
    assert player.asked[0].beside == {}


@pytest.fixture
def placed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a database and a map for 5 requests/s of a model that takes 40 ms on the whole of a V100."""
    place_on(tmp_path, monkeypatch, "v100:2", "model,rate_rps,slo_ms\nnet,5,800\n")
    return tmp_path


def place_on(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, table: str) -> None:
    """Write a database with a model that takes 40 ms on the whole of a V100, and a map for what is asked of it."""
    rows = [
        measured_row(
            "net", 1, 4000.0 / share, device="v100", share=share, path="net.onnx", sha256="0" * 64, repeats=100,
            std_ms=0.0, memory=2**28,
        )
        for share in (25.0, 50.0, 75.0, 100.0)
    ]  # fmt: skip
    database(folder / "gpuprof-db", rows)
    (folder / "slo.csv").write_text(table)
    monkeypatch.chdir(folder)
    assert main(["place", "-o", "first.json", "--gpus", gpus, "--max-batch", "1"]) == 0


class Loaded:
    """Sends one open-loop load after another, until it is left."""

    def __init__(self, target: Target, *streams: RequestStream) -> None:
        self.results: list[ModelResult] = []
        self._target, self._streams = target, streams
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        # A load begins a second after the one before: shorter loads would look like half of their rate.
        settings = LoadSettings(duration_s=8.0, warmup_s=0.0, arrivals="constant", clients=1)
        while not self._stop.is_set():
            self.results += run_load(self._target, list(self._streams), settings).results


@pytest.mark.slow
def test_when_the_rate_doubles_another_map_is_applied_and_goodput_recovers(placed_folder: Path) -> None:
    document = json.loads((placed_folder / "first.json").read_text())
    (partition,) = document["nodes"][0]["gpus"][0]["partitions"]
    quarter = {"sm_share_pct": 25.0, "batch_latency_ms": [160.0], "rate_rps": 5.0}  # it bears 6/s
    partition["replicas"] = [partition["replicas"][0] | quarter]
    adapted = placed_folder / "map.adapted.json"
    what = ("--simulate", "--adapt", "--adapt-period", "2", "--db", str(placed_folder / "gpuprof-db"), "--log", "json")
    with running(placed_folder, document, *what) as server:
        with Loaded(Target.parse(server.url), RequestStream("net", 22.0, 800.0)) as loaded:
            # The first period may see only the beginning of the load, and a busy machine may spoil a second of it.
            assert eventually(lambda: adapted.exists() and read_map(adapted).models["net"].rate_rps > 12.0, 150.0)
            served = len(loaded.results)
            assert eventually(
                lambda: any(result.in_slo == result.sent for result in loaded.results[served:]), limit_s=100.0
            )
        _, errors = server.stop()
    assert loaded.results[0].refused > 0
    assert loaded.results[0].in_slo < 0.9 * loaded.results[0].sent
    assert all(result.lost == result.failed == 0 for result in loaded.results)
    decided = decisions(errors, "the placer is asked")
    moved = decisions(errors, "another map is served")
    # On a machine that holds up the client, the requests that are late are counted before enough of them have come.
    assert decided[0]["models"]["net"]["why"] in ("more requests than planned", "p99 passes the SLO")
    assert any(move["started"] for move in moved)
    assert moved[-1]["planned_rps"]["net"] > 12.0
    assert read_map(adapted).models["net"].slo_ms == 800.0


def test_without_a_database_it_is_said_at_the_start(placed_folder: Path, cli: CommandLine) -> None:
    assert "nowhere does not exist" in cli("serve first.json --simulate --adapt --db nowhere", code=3).err
