from __future__ import annotations

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device, MigProfile
from gpuprof.domain.mig import count_profiles, maximal_layouts
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

DEVICE = Device(
    name="tiny",
    kind="gpu",
    compute_units=100,
    clock_mhz=1000.0,
    flops_per_s={"float32": 1e12},
    dram_bytes=80,
    dram_bytes_per_s=1e12,
    l2_bytes=1,
    mig_profiles=(MigProfile("3g.40gb", 42, 40, 4, 3, (0, 4), 2),),
)


def test_the_fraction_of_a_share_inside_an_instance_counts_the_instances_own_sms() -> None:
    assert DEVICE.fraction(Share(25.0)) == 0.25
    assert DEVICE.fraction(Share(50.0, "3g.40gb")) == pytest.approx(0.21)


def test_an_instance_brings_its_own_memory_and_a_percentage_all_of_it() -> None:
    assert DEVICE.memory_bytes(Share(10.0)) == 80
    assert DEVICE.memory_bytes(Share(10.0, "3g.40gb")) == 40


def test_a_profile_that_the_device_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(InputError, match=r"no MIG profile '1g.5gb' \(it has 3g.40gb\)"):
        DEVICE.fraction(Share(100.0, "1g.5gb"))


@pytest.mark.parametrize(
    ("board", "name", "profile"),
    [
        ("h100-pcie", "7g.79gb", "7g.80gb"),
        ("a100-80", "1g.10gb+me", "1g.10gb"),
        ("rtx-pro-6000", "2g.48gb+me.all", "2g.48gb"),
        ("rtx-pro-6000", "1g.24gb+gfx", "1g.24gb"),
        ("rtx-pro-6000", "1g.24gb-me", "1g.24gb"),
        ("gb200", "1g.24gb", "1g.23gb"),
        ("h100", "1g.20gb", "1g.20gb"),
    ],
)
def test_names_of_other_drivers_and_engines_mean_the_same_profile(board: str, name: str, profile: str) -> None:
    assert device(board).mig_profile(name).name == profile
    assert device(board).fraction(Share(mig=name)) == device(board).fraction(Share(mig=profile))


@pytest.mark.parametrize("name", ["1g.40gb", "5g.80gb", "2g.20gb+cpu", "whole"])
def test_other_profiles_are_none_of_a_device(name: str) -> None:
    with pytest.raises(InputError, match="has no MIG profile"):
        device("a100-80").mig_profile(name)


def test_an_rtx_pro_6000_is_cut_in_quarters_or_halves() -> None:
    layouts = {count_profiles(layout) for layout in maximal_layouts(device("rtx-pro-6000"))}
    assert layouts == {(("1g.24gb", 4),), (("1g.24gb", 2), ("2g.48gb", 1)), (("2g.48gb", 2),), (("4g.96gb", 1),)}
