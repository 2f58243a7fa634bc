"""The device catalogue agrees with itself, and MIG geometry with brute force and with what is known of the A100."""

import os
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.devices_table import PAGE, page
from gpuprof.domain.catalogue import device, device_of_driver, devices, matching_names, read_device_file, read_offers
from gpuprof.domain.device import Device, MigProfile
from gpuprof.domain.mig import (
    MigPlacement,
    basic_profiles,
    count_profiles,
    distinct_layouts,
    find_violation,
    is_legal,
    legal_starts,
    make_placement,
    maximal_layouts,
)
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.pipeline.devices import resolve_device

_NAMES = """
k80 p4 p100 t4 v100 v100-32 v100-pcie-16 v100-pcie-32 a10 a30 a40 a100-40 a100-80 a100-pcie-40 a100-pcie-80
rtx-3090 rtx-4090 rtx-5090 l4 l40 l40s h100 h100-pcie h100-nvl gh200 h200 b200 gb200 rtx-pro-6000 a2 a10g
rtx-a5000 rtx-a6000 rtx-6000-ada l20 h20 b300 gb300
"""
NAMES = _NAMES.split()
WITH_MIG = ["a30", "a100-40", "a100-80", "a100-pcie-40", "a100-pcie-80", "h100", "h200", "b200"]
WITH_MIG += ["h100-pcie", "h100-nvl", "gh200", "gb200", "rtx-pro-6000", "h20", "b300", "gb300"]

#: Operations that one SM does in a cycle (a multiply-add is two): CUDA C++ Programming Guide, arithmetic throughput,
#: and for tensor cores the architecture whitepapers.
_RATES = """
SM    float64  float32 tfloat32  float16 bfloat16     int8   float8   float4
3.7       128      384        -        -        -        -        -        -
6.0        64      128        -      256        -        -        -        -
6.1         8      256        -        -        -     1024        -        -
7.0        64      128        -     1024        -        -        -        -
7.5         4      128        -     1024        -     2048        -        -
8.0       128      128     1024     2048     2048     4096        -        -
8.6         4      256      512     1024     1024     2048        -        -
8.9         4      256      512     1024     1024     2048     2048        -
9.0       256      256     2048     4096     4096     8192     8192        -
10.0      128      256     4096     8192     8192    16384    16384    32768
10.3        4      256     4096     8192     8192    16384    16384    49152
12.0        4      256      512     1024     1024     2048     2048     4096
"""
_TABLE = [line.split() for line in _RATES.strip().splitlines()]
PER_SM_AND_CYCLE = {
    row[0]: {name: int(rate) for name, rate in zip(_TABLE[0][1:], row[1:], strict=True) if rate != "-"}
    for row in _TABLE[1:]
}
#: Under tensor load these clock lower than their boost: 1830 and 1620 MHz are in the H100 whitepaper, the others follow
#: from the published rates.
TENSOR_CLOCK_MHZ = {"h100": 1830.0, "h200": 1830.0, "gh200": 1830.0, "h100-pcie": 1620.0, "h100-nvl": 1545.0}
TENSOR_CLOCK_MHZ |= {"b200": 1850.0, "gb200": 2007.0, "b300": 1856.0, "gb300": 2008.0}
TENSOR_TYPES = {"tfloat32", "float16", "bfloat16", "int8", "float8", "float4"}
#: Boards whose tensor cores do half of what an SM of their capability can: of the GeForce, and of the L40, the rate
#: with float32 accumulation is halved.
HALVED = dict.fromkeys(("rtx-3090", "rtx-4090", "rtx-5090", "l40", "l20", "a10g"), 0.5) | {"h20": 148 / 632.5}
#: Rates that a product was cut down to, whatever its SMs could do.
CUT = {("h20", "float64"), ("b300", "int8"), ("gb300", "int8")}
WHOLE = {("rtx-3090", "int8"), ("rtx-4090", "int8"), ("rtx-5090", "int8"), ("rtx-5090", "float4")}


@pytest.fixture(params=NAMES)
def gpu(request: pytest.FixtureRequest) -> Device:
    return device(str(request.param))


def test_every_promised_gpu_is_there() -> None:
    assert sorted(devices()) == sorted(NAMES)


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown device 'a100' \(did you mean a100-40\b"):
        device("a100")


def test_rates_follow_from_sms_clock_and_what_an_sm_does_in_a_cycle(gpu: Device) -> None:
    assert gpu.compute_capability is not None
    per_cycle = PER_SM_AND_CYCLE[gpu.compute_capability]
    assert set(gpu.flops_per_s) == set(per_cycle)
    for dtype, rate in gpu.flops_per_s.items():
        tensor = dtype in TENSOR_TYPES and len(per_cycle) > 3
        clock = TENSOR_CLOCK_MHZ.get(gpu.name, gpu.clock_mhz) if tensor else gpu.clock_mhz
        if (gpu.name, dtype) in CUT:
            continue
        each = float(per_cycle[dtype])
        if tensor and (gpu.name, dtype) not in WHOLE:
            each *= HALVED.get(gpu.name, 1.0)
        assert rate == pytest.approx(gpu.compute_units * clock * 1e6 * each, rel=0.03), dtype


def test_limits_of_an_sm_are_consistent(gpu: Device) -> None:
    assert gpu.sm is not None
    assert gpu.sm.threads == 32 * gpu.sm.warps
    assert gpu.sm.max_shared_memory_per_block_bytes <= gpu.sm.shared_memory_bytes
    assert gpu.sm.max_registers_per_block <= gpu.sm.registers


def test_every_group_of_numbers_says_where_it_was_read(gpu: Device) -> None:
    groups = {"name", "compute", "memory", "limits", "power", "price"} | ({"mig"} if gpu.mig_profiles else set())
    assert set(gpu.sources) == groups
    assert all(gpu.sources.values())


def test_mig_is_where_it_should_be(gpu: Device) -> None:
    assert bool(gpu.mig_profiles) == (gpu.name in WITH_MIG) == bool(gpu.mig_slices)


@pytest.mark.parametrize("name", WITH_MIG)
def test_mig_profiles_lie_inside_their_gpu_have_the_memory_of_their_names_and_grow_in_everything(name: str) -> None:
    gpu = device(name)
    for profile in gpu.mig_profiles:
        assert profile.compute_slices == int(profile.name.split("g.")[0])
        assert profile.sms <= gpu.compute_units
        assert profile.sms * profile.max_count <= gpu.compute_units
        assert profile.memory_bytes * profile.max_count <= gpu.dram_bytes
        assert len(profile.start_slots) >= profile.max_count
        assert all(start + profile.memory_slices <= gpu.mig_slices for start in profile.start_slots)
        assert list(profile.start_slots) == sorted(set(profile.start_slots))
        named = int(profile.name.split(".")[1].removesuffix("gb"))
        assert 0.85 * named <= profile.memory_bytes / 2**30 <= named, profile.name
    profiles = sorted(gpu.mig_profiles, key=lambda profile: (profile.compute_slices, profile.memory_slices))
    for smaller, larger in pairwise(profiles):
        assert smaller.sms <= larger.sms and smaller.memory_bytes <= larger.memory_bytes
    assert profiles[-1].memory_slices == gpu.mig_slices


def test_a_board_is_found_by_its_drivers_name() -> None:
    board = device_of_driver("NVIDIA H200")
    assert board is device("h200")
    assert device_of_driver("NVIDIA H200 NVL") is None


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m bench.devices_table"


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


BOARD = """
[rtx-2080-ti]
compute_units = 68
clock_mhz = 1545
dram_mib = 11264
dram_gb_per_s = 616
l2_mib = 5.5
compute_capability = "7.5"
tflops = { float32 = 13.4, float16 = 107.5 }
"""


def test_a_board_of_ones_own_is_read_with_the_units_of_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(BOARD + "max_power_w = 250\nprice_per_hour = 0.3\ndram_type = 'gddr6'\nprocess_nm = 12\n")
    board = read_device_file(path)["rtx-2080-ti"]
    assert (board.name, board.compute_units, board.clock_mhz) == ("rtx-2080-ti", 68, 1545.0)
    assert (board.dram_bytes, board.dram_bytes_per_s, board.l2_bytes) == (11264 << 20, 616e9, int(5.5 * 2**20))
    assert dict(board.flops_per_s) == {"float32": 13.4e12, "float16": 107.5e12}
    assert (board.max_power_w, board.price_per_hour, board.dram_type, board.process_nm) == (250.0, 0.3, "gddr6", 12.0)
    assert board.sm == device("t4").sm  # of the same compute capability


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "describes no device"),
        ("[a b", "is not TOML"),
        (BOARD.replace("rtx-2080-ti", "t4"), r"\[t4\]: the name is a name of gpuprof's own"),
        (BOARD.replace("[rtx-2080-ti]", '["RTX 2080"]'), "the name must be of a-z"),
        (BOARD.replace("compute_units = 68\n", ""), "compute_units: Field required"),
        (BOARD.replace("compute_units = 68", "compute_units = -1"), "compute_units: Input should be greater"),
        (BOARD.replace("clock_mhz = 1545", "clock_mhz = inf"), "clock_mhz: Input should be"),
        (BOARD + "colour = 'red'\n", "colour: Extra inputs are not permitted"),
        (BOARD.replace("float16", "float12"), "tflops: unknown type 'float12'"),
        (BOARD.replace("float32 = 13.4, ", ""), "tflops: float32 is missing"),
        ("name = 1", r"\[name\]"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_device_file(path)


def test_an_instance_has_sms_and_memory_of_its_own_and_a_percentage_a_part_of_the_sms_alone() -> None:
    a100 = device("a100-80")
    profile = a100.mig_profile("3g.40gb")
    assert a100.fraction(Share(25.0)) == 0.25
    assert a100.fraction(Share(50.0, "3g.40gb")) == pytest.approx(0.5 * profile.sms / a100.compute_units)
    assert a100.memory_bytes(Share(10.0)) == a100.dram_bytes
    assert a100.memory_bytes(Share(10.0, "3g.40gb")) == profile.memory_bytes
    with pytest.raises(InputError, match=r"no MIG profile '1g.5gb' \(it has 1g.10gb, "):
        a100.fraction(Share(100.0, "1g.5gb"))


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


def test_an_rtx_pro_6000_is_cut_in_quarters_or_halves() -> None:
    layouts = {count_profiles(layout) for layout in maximal_layouts(device("rtx-pro-6000"))}
    assert layouts == {(("1g.24gb", 4),), (("1g.24gb", 2), ("2g.48gb", 1)), (("2g.48gb", 2),), (("4g.96gb", 1),)}


A100 = device("a100-80")


def _place(*words: str) -> list[MigPlacement]:
    return [make_placement(A100, name, int(start)) for name, start in (word.split("@") for word in words)]


@st.composite
def geometries(draw: st.DrawFn) -> Device:
    """Small GPUs with any profiles, sensible or not."""
    memory = draw(st.integers(1, 5))
    profiles = []
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, memory))
        starts = draw(st.sets(st.integers(0, memory - size), min_size=1, max_size=4))
        slices, most = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        sms = draw(st.integers(1, 4))
        profiles.append(MigProfile(f"{slices}g.{index}gb", sms, size, size, slices, tuple(sorted(starts)), most))
    return Device(
        "toy", "gpu", 16, 1000.0, {}, memory, 1.0, 1, mig_slices=memory, mig_profiles=tuple(profiles)
    )  # fmt: skip


def _brute_legal(gpu: Device, items: tuple[MigPlacement, ...]) -> bool:
    slots = [slot for item in items for slot in range(item.start, item.start + item.profile.memory_slices)]
    names = [item.profile.name for item in items]
    return (
        len(slots) == len(set(slots))
        and all(item.start in item.profile.start_slots for item in items)
        and all(names.count(profile.name) <= profile.max_count for profile in gpu.mig_profiles)
        and sum(item.profile.compute_slices for item in items)
        <= max(profile.compute_slices for profile in gpu.mig_profiles)
    )


def _all_legal(gpu: Device) -> set[frozenset[MigPlacement]]:
    pairs = [MigPlacement(profile, start) for profile in gpu.mig_profiles for start in profile.start_slots]
    return {
        frozenset(chosen)
        for size in range(gpu.mig_slices + 1)
        for chosen in combinations(pairs, size)
        if _brute_legal(gpu, chosen)
    }


@given(geometries())
def test_maximal_layouts_are_what_brute_force_finds(gpu: Device) -> None:
    legal = _all_legal(gpu)
    maximal = {layout for layout in legal if not any(layout < rival for rival in legal)}
    layouts = maximal_layouts(gpu)
    assert {frozenset(layout) for layout in layouts} == maximal
    assert len(layouts) == len(maximal)
    assert all([item.start for item in layout] == sorted(item.start for item in layout) for layout in layouts)


@given(geometries(), st.data())
def test_legality_and_legal_starts_agree_with_brute_force(gpu: Device, data: st.DataObject) -> None:
    profiles = st.sampled_from(gpu.mig_profiles)
    items = data.draw(st.lists(st.builds(MigPlacement, profiles, st.integers(0, 5)), max_size=4))
    legal = _brute_legal(gpu, tuple(items))
    assert is_legal(gpu, items) == legal
    if legal:
        profile = data.draw(profiles)
        starts = [start for start in range(6) if _brute_legal(gpu, (*items, MigPlacement(profile, start)))]
        assert list(legal_starts(gpu, profile, items)) == starts


def test_an_a100_has_19_maximal_layouts_of_its_basic_profiles() -> None:
    basic = basic_profiles(A100)
    assert [profile.name for profile in basic] == ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
    assert len(maximal_layouts(A100, basic)) == 19
    assert len(distinct_layouts(A100, basic)) == 14
    held = [Counter(dict(count_profiles(layout))) for layout in distinct_layouts(A100, basic)]
    assert sum(not any(layout < rival for rival in held) for layout in held) == 12  # 3g + 3g is in 4g + 3g by size only


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["3g.40gb@0", "1g.10gb@3"], "1g.10gb@3 overlaps 3g.40gb@0 at memory slice 3"),
        (["4g.40gb@4"], "4g.40gb may start at slots 0 but got 4"),
        (["1g.10gb@7"], "1g.10gb may start at slots 0, 1, 2, 3, 4, 5, 6 but got 7"),
    ],
)
def test_a_refusal_names_the_rule_and_the_values(words: list[str], rule: str) -> None:
    assert find_violation(A100, _place(*words)) == rule


OFFERS = """\
instance_name,location,price,gpu_count,gpu_name,gpu_memory,spot
g4dn.xlarge,us-east-1,0.5,1,T4,16.0,False
g4dn.16xlarge,us-east-1,4.0,1,T4,16.0,False
g4dn.xlarge,us-east-1,0.1,1,T4,16.0,True
g4dn.12xlarge,eu-west-1,2.8,4,T4,16.0,False
m5.large,us-east-1,0.1,0,,,False
p4d.24xlarge,us-east-1,32.0,8,A100,40.0,False
fraction,us-east-1,0.4,1,A10,4.0,False
mi300x,us-east-1,2.0,1,MI300X,192.0,False
v620,us-east-1,2.0,1,V620,,False
"""


def test_an_offer_prices_the_boards_it_may_be_by_the_cheapest_hour_of_each_place(tmp_path: Path) -> None:
    (tmp_path / "aws.csv").write_text(OFFERS)
    boards = (
        "g,us,0.6,1,T4,16.0,False",
        "g,eu,inf,1,T4,16.0,False",
        "g,us,1.5,1,RTX6000Ada,48.0,False",
        "g,us,7.0,1,H100NVL,94.0,False",
    )
    (tmp_path / "vastai.csv").write_text("\n".join([OFFERS.partition("\n")[0], *boards]))
    os.utime(tmp_path / "aws.csv", (1.7e9, 1.7e9))
    offers = read_offers(tmp_path, devices().values())
    assert (offers["t4"].price_per_hour, offers["t4"].price_interval) == (0.6, (0.5, 0.7))  # no spot, no large hosts
    assert offers["t4"].price_date == "2023-11-14"
    assert set(offers) == {"t4", "a100-40", "a100-pcie-40", "rtx-6000-ada", "h100-nvl"}
    assert offers["a100-40"].price_per_hour == 4.0
    assert read_offers(tmp_path / "aws.csv", devices().values()).keys() == {"t4", "a100-40", "a100-pcie-40"}


@pytest.mark.parametrize("text", ["model,rate_rps\na,1\n", OFFERS.replace("0.5,1,T4", "dear,1,T4"), OFFERS[:70]])
def test_files_without_offers_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "aws.csv").write_text(text)
    with pytest.raises(InputError, match="gpuhunt"):
        read_offers(tmp_path / "aws.csv", devices().values())
