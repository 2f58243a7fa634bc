"""iGniter's workloads (TPDS'22, Tables 1 and 3): the model of each, and the demands."""

from __future__ import annotations

from dataclasses import replace

from gpuprof.domain.demand import Demand
from gpuprof.lab.scenarios import listed_demands


def table_1() -> tuple[dict[str, str], tuple[Demand, ...]]:
    """Return the models and demands of §2.3, whose plan Table 1 prints."""
    return _split_models(listed_demands("igniter", "Table1"))


def table_3(copies: int = 1) -> tuple[dict[str, str], tuple[Demand, ...]]:
    """Return the models and demands of W1 … W12, each ``copies`` times."""
    return _split_models(listed_demands("igniter", "W12", copies))


def _split_models(demands: tuple[Demand, ...]) -> tuple[dict[str, str], tuple[Demand, ...]]:
    models = {demand.model: demand.source_model or demand.model for demand in demands}
    return models, tuple(replace(demand, source_model=None) for demand in demands)
