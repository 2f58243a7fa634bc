from __future__ import annotations

import pytest

from gpuprof.domain.device import Device, MigProfile
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
