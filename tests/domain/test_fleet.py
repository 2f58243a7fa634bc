from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.fleet import parse_fleet, read_fleet
from gpuprof.errors import InputError, unknown_name


def _find(name: str) -> Device:
    if name not in {"a", "b"}:
        raise unknown_name("device", name, ["a", "b"])
    return Device(name, "gpu", 1, 1.0, {}, 1, 1.0, 1, price_per_hour=2.0 if name == "a" else None)


def test_a_name_without_a_count_means_as_many_as_needed() -> None:
    fleet = parse_fleet("a:8, b", _find)
    assert [(entry.device.name, entry.count) for entry in fleet.entries] == [("a", 8), ("b", None)]
    assert fleet.is_elastic
    assert not parse_fleet("a:8", _find).is_elastic


def test_a_device_without_a_price_counts_as_one() -> None:
    assert [entry.price_per_hour for entry in parse_fleet("a,b", _find).entries] == [2.0, 1.0]


@pytest.mark.parametrize("text", ["", " , ", "a:0", "a:-1", "a:x", "a:1.5", "a:", "a:1,a:2", "c", "a b"])
def test_a_fleet_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_fleet(text, _find)


def test_a_fleet_file_may_set_counts_and_prices(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[[gpus]]\ndevice = "a"\ncount = 3\nprice_per_hour = 0.5\n[[gpus]]\ndevice = "b"\n')
    first, second = read_fleet(path, _find).entries
    assert (first.count, first.price_per_hour) == (3, 0.5)
    assert (second.count, second.price_per_hour) == (None, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpus = 3",
        "[[gpus]]\ncount = 1",
        '[[gpus]]\ndevice = "a"\ncolour = 1',
        '[[gpus]]\ndevice = "a"\nprice_per_hour = -1',
        '[[gpus]]\ndevice = "a"\nprice_per_hour = true',
        '[[gpus]]\ndevice = "a"\ncount = 0',
        "no toml [",
    ],
)
def test_a_wrong_fleet_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(InputError):
        read_fleet(path, _find)
