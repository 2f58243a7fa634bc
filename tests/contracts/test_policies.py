from __future__ import annotations

import pytest

from bench.baselines.alpaserve import AlpaServe
from bench.baselines.mig_serving import MigServing
from bench.baselines.paris_elsa import ParisElsa
from bench.baselines.shepherd import Shepherd
from gpuprof.placement.contract import PolicyContract, plain_device, sliced_device
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.gpulet import Gpulet
from gpuprof.placement.published.gslice import Gslice
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.published.milp import Milp
from gpuprof.placement.published.parvagpu import ParvaGpu
from gpuprof.placement.published.usher import Usher


class TestFirstFitDecreasing(PolicyContract):
    def policy(self) -> Policy:
        return FirstFitDecreasing()


class TestFirstFitDecreasingOnSlicedDevices(TestFirstFitDecreasing):
    fleet = ((sliced_device(), None),)


class TestFirstFitDecreasingOnTwoKinds(TestFirstFitDecreasing):
    fleet = ((sliced_device(), None), (plain_device(), None))


class TestParvaGpu(PolicyContract):
    fleet = ((sliced_device(), None),)

    def policy(self) -> Policy:
        return ParvaGpu()


class TestParvaGpuSingleUnoptimized(TestParvaGpu):
    def policy(self) -> Policy:
        return ParvaGpu(single=True, unoptimized=True)


class TestOptimal(PolicyContract):
    def policy(self) -> Policy:
        return Optimal()


@pytest.mark.slow
class TestOptimalOnSlicedDevices(TestOptimal):
    fleet = ((sliced_device(), None),)


@pytest.mark.slow
class TestOptimalOnTwoKinds(TestOptimal):
    fleet = ((sliced_device(), None), (plain_device(), None))


class TestUsher(PolicyContract):
    def policy(self) -> Policy:
        return Usher()


class TestUsherOnTwoKinds(TestUsher):
    fleet = ((sliced_device(), None), (plain_device(), None))


class TestMilp(PolicyContract):
    fleet = ((plain_device(), 8),)
    many = 10

    def policy(self) -> Policy:
        return Milp()


class TestIgniter(PolicyContract):
    def policy(self) -> Policy:
        return Igniter()


class TestIgniterByThePapersRule(TestIgniter):
    options = Options(latency_budget=0.5)


class TestGpulet(PolicyContract):
    def policy(self) -> Policy:
        return Gpulet()


class TestGpuletInTurn(TestGpulet):
    def policy(self) -> Policy:
        return Gpulet(temporal=True)


class TestGslice(PolicyContract):
    def policy(self) -> Policy:
        return Gslice()


class TestGsliceByThePapersRule(TestGslice):
    options = Options(latency_budget=0.5)


class TestMigServing(PolicyContract):
    fleet = ((sliced_device(), None),)

    def policy(self) -> Policy:
        return MigServing()


class TestShepherd(PolicyContract):
    def policy(self) -> Policy:
        return Shepherd()


class TestShepherdOnSlicedDevices(TestShepherd):
    fleet = ((sliced_device(), None),)


class TestAlpaServe(PolicyContract):
    def policy(self) -> Policy:
        return AlpaServe()


class TestAlpaServeOnSlicedDevices(TestAlpaServe):
    fleet = ((sliced_device(), None),)


class TestParisElsa(PolicyContract):
    fleet = ((sliced_device(), None),)

    def policy(self) -> Policy:
        return ParisElsa()
