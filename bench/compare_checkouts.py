"""Compares the servers of several checkouts of this repository: whether a change made serving faster.

    python -m bench.compare_checkouts OLD NEW … [--rounds N] [--seconds S] [--only http,grpc] [--cases null:4]

The servers run side by side, idle but for the one that is asked, and each round asks all of them, every other one in
reverse order, so that all meet the machine as it happens to be. Clients are those of this checkout. Printed for each
case are the median requests/s and CPU time a request of the router, and of the rounds' ratios to the first checkout the
median, the least and the most: a change whose ratios lie on both sides of 1 has shown nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.clients import LoopResult, grpc_loop, http_loop, measure_loop
from bench.serving import IDENTITIES, Case, infer_message, read_port, serve_model
from gpuprof.serving.load.target import Target, requests_for

#: None of the requests is refused.
_SLO_MS = 60_000.0


@dataclass(frozen=True)
class CheckoutServer:
    """A server that was started from a checkout, and its ports."""

    process: psutil.Process
    http_port: int
    grpc_port: int

    def ask(self, protocol: str, case: Case, seconds: float) -> LoopResult:
        """Keep requests in flight for so long."""
        if protocol == "http":
            requests = requests_for(Target("127.0.0.1", self.http_port), "m", None, 0)
            return measure_loop(self.process, seconds, http_loop(self.http_port, requests, case.concurrency))
        message = infer_message(case.model, self.http_port)
        return measure_loop(self.process, seconds, grpc_loop(self.grpc_port, message, case.concurrency))


@dataclass(frozen=True)
class CheckoutRates:
    """What the checkouts did in one case: each a list with an entry a round."""

    rates_rps: tuple[tuple[float, ...], ...]
    router_ms: tuple[tuple[float, ...], ...]

    def ratios(self, number: int) -> list[float]:
        """Return how many times as many requests/s as the first one checkout did, ascending."""
        return sorted(rate / first for first, rate in zip(self.rates_rps[0], self.rates_rps[number], strict=True))


def compare(
    servers: Sequence[CheckoutServer], protocol: str, case: Case, *, rounds: int = 7, seconds: float = 1.5
) -> CheckoutRates:
    """Ask all servers in turn, in every other round in reverse order."""
    results: list[list[LoopResult]] = [[] for _ in servers]
    for turn in range(rounds):
        order = list(zip(servers, results, strict=True))
        for server, its_results in reversed(order) if turn % 2 else order:
            its_results.append(server.ask(protocol, case, seconds))
    return CheckoutRates(
        tuple(tuple(result.rate_rps for result in one) for one in results),
        tuple(tuple(result.router_ms for result in one) for one in results),
    )


@contextmanager
def serve_checkout(root: Path, model: str) -> Iterator[CheckoutServer]:
    """Run the server of the checkout at ``root``."""
    with serve_model(model, 1, _SLO_MS, "--grpc-port", "0", checkout=root) as (process, line):
        if not line:
            raise SystemExit(f"the server of {root} did not start")
        yield CheckoutServer(process, read_port(line, "http://"), read_port(line, "grpc://"))


def main() -> int:
    """Print one line a case and checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders; the others are told as times of the first")
    parser.add_argument("--rounds", type=int, default=7, help="in each of which every server is asked once")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each server in each round")
    parser.add_argument("--only", default="http,grpc", help="protocols")
    parser.add_argument("--cases", default="", help="only cases whose model's name contains this")
    said = parser.parse_args()
    names = f"{'protocol':8s} {'model':12s} {'in flight':>9s} {'req/s':>8s} {'router ms':>9s}"
    print(f"{names}   times the first (least to most)")
    for model in dict.fromkeys(case.model for case in IDENTITIES if said.cases in case.model):
        with ExitStack() as running:
            servers = [running.enter_context(serve_checkout(root.resolve(), model)) for root in said.checkouts]
            for protocol in said.only.split(","):
                for case in (case for case in IDENTITIES if case.model == model):
                    compared = compare(servers, protocol, case, rounds=said.rounds, seconds=said.seconds)
                    show(said.checkouts, protocol, case, compared)
    return 0


def show(checkouts: Sequence[Path], protocol: str, case: Case, compared: CheckoutRates) -> None:
    """Print one line a checkout."""
    for number, root in enumerate(checkouts):
        rate_rps, router_ms = (statistics.median(one[number]) for one in (compared.rates_rps, compared.router_ms))
        ratios = compared.ratios(number)
        what = f"{protocol:8s} {case.name:12s} {case.concurrency:9d} {rate_rps:8.0f} {router_ms:9.3f}"
        print(f"{what}   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  {root}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
