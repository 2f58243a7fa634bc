from __future__ import annotations

import pytest

from gpuprof.domain.catalogue import devices, matching_names
from gpuprof.pipeline.devices import resolve_device


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("a100 pcie 40gb", "a100-pcie-40"),
        ("Tesla T4", "t4"),
        ("H100 SXM", "h100"),
        ("h100_pcie", "h100-pcie"),
        ("H100 NVL", "h100-nvl"),
        ("V100 SXM2 32GB", "v100-32"),
        ("NVIDIA L40S", "l40s"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("GH200", "gh200"),
    ],
)
def test_names_as_people_and_drivers_write_them_find_their_board(said: str, meant: str) -> None:
    assert resolve_device(said, None).name == meant


@pytest.mark.parametrize("said", ["RTX 6000", "A10M", "RTX 3090 Ti", "A100X", "B350", "gpu", "", "80GB", "pcie"])
def test_products_that_the_catalogue_lacks_are_not_taken_for_others(said: str) -> None:
    assert matching_names(said) == ()


def test_every_name_of_the_catalogue_means_its_own_board_first() -> None:
    for name, board in devices().items():
        assert name in matching_names(name)
        assert name in matching_names(board.sources["name"].split("(")[0])


def test_a_name_of_several_boards_is_taken_for_the_first_and_that_is_told() -> None:
    notes: list[str] = []
    assert resolve_device("NVIDIA A100", None, note=notes.append).name == "a100-40"
    assert notes == ["NVIDIA A100 is taken for a100-40; it may also mean a100-80, a100-pcie-40, a100-pcie-80"]
