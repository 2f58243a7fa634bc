"""What users write beside models: demands, fleets, and files that are written whole or not at all."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo, read_demands
from gpuprof.domain.device import Device
from gpuprof.domain.file_access import refuse_pipe, refuse_to_replace, write_atomically
from gpuprof.domain.fleet import parse_fleet, read_fleet
from gpuprof.errors import InputError, unknown_name


def _read_text(tmp_path: Path, text: str) -> tuple[Demand, ...]:
    path = tmp_path / "slo.csv"
    path.write_text(text, encoding="utf-8")
    return read_demands(path)


def test_columns_may_stand_in_any_order_and_case_and_optional_ones_may_be_empty(tmp_path: Path) -> None:
    text = "SLO_ms, model,Rate_RPS,percentile,max_replicas\n40,resnet50,400,,\n\n# night\n25.5, bert ,1e1,95,3\n"
    assert _read_text(tmp_path, text) == (
        Demand("resnet50", 400.0, Slo(40.0, 99.0)),
        Demand("bert", 10.0, Slo(25.5, 95.0), max_replicas=3),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,rate_rps\na,1\n", r"slo.csv:1: the header lacks slo_ms"),
        ("model;rate_rps;slo_ms\na;1;1\n", r"slo.csv:1: fields are separated by ';', not by commas"),
        ("model,rate_rps,slo_ms\na,1,20ms\n", r"slo_ms must be a number but got '20ms' \(no units"),
        (
            "model,rate_rps,slo_ms,percentile\na,1,1,0.99\n",
            r"slo.csv:2: percentile of the SLO of 'a' must be a number from 1 to 99.999 but got 0.99",
        ),
        ("model,rate_rps,slo_ms,color\n", r"slo.csv:1: unknown column 'color'"),
        ("model,rate_rps,slo_ms,model\n", r"stands twice"),
        (
            "model,rate_rps,slo_ms\na,nan,1\n",
            r"slo.csv:2: rate_rps of 'a' must be a number from 1e-09 to .* but got nan",
        ),
        (
            "model,rate_rps,slo_ms\na,1,inf\n",
            r"slo.csv:2: latency_ms of the SLO of 'a' must be a number above 0 and finite but got inf",
        ),
        ("model,rate_rps,slo_ms\na,many,1\n", r"slo.csv:2: rate_rps must be a number but got 'many'"),
        ("model,rate_rps,slo_ms\nb,1,1\na,1\n", r"slo.csv:3: 2 fields where the header has 3"),
        ("model,rate_rps,slo_ms\n,1,1\n", r"slo.csv:2: model is empty"),
        ("model,rate_rps,slo_ms\na,1,1\na,2,2\n", r"slo.csv:3: 'a' was already asked for in line 2"),
        ("model,rate_rps,slo_ms,max_replicas\na,1,1,1.5\n", r"max_replicas must be a whole number but got 1.5"),
        (
            "model,rate_rps,slo_ms,min_goodput_rps\na,1,1,2\n",
            r"min_goodput_rps of 'a' must be a number from 0 to 1 but got 2",
        ),
        ("model,rate_rps,slo_ms\n", r"holds no demands"),
        ("", r"holds no demands"),
        ('model,rate_rps,slo_ms\n"a,1,1\n', r"not CSV"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read_text(tmp_path, text)


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none.csv: No such file"):
        read_demands(tmp_path / "none.csv")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07\xff\xfe")
    with pytest.raises(InputError, match="not a text file"):
        read_demands(tmp_path / "model.onnx")


@given(st.text(max_size=200))
def test_no_text_makes_it_crash(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "slo.csv"
    path.write_text("model,rate_rps,slo_ms\n" + text, encoding="utf-8", errors="replace")
    try:
        demands = read_demands(path)
    except InputError:
        return
    assert all(demand.rate_rps > 0 and demand.slo.latency_ms > 0 for demand in demands)


def _find(name: str) -> Device:
    if name not in {"a", "b"}:
        raise unknown_name("device", name, ["a", "b"])
    return Device(name, "gpu", 1, 1.0, {}, 1, 1.0, 1, price_per_hour=2.0 if name == "a" else None)


def test_a_name_without_a_count_means_as_many_as_needed() -> None:
    fleet = parse_fleet("a:8, b", _find)
    assert [(entry.device.name, entry.count) for entry in fleet.entries] == [("a", 8), ("b", None)]
    assert [entry.price_per_hour for entry in fleet.entries] == [2.0, 1.0]  # without prices, the cost counts devices
    assert fleet.is_elastic
    assert not parse_fleet("a:8", _find).is_elastic


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


def test_files_and_what_is_missing_are_left_to_whoever_opens_them(tmp_path: Path) -> None:
    file = tmp_path / "slo.csv"
    file.touch()
    for path in (file, tmp_path, tmp_path / "missing", Path("a\0b")):
        assert refuse_pipe(path) is path


def test_named_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"it is a named pipe, which may never end \(give the path of a file\)"):
        refuse_pipe(tmp_path / "pipe")
    with pytest.raises(InputError, match="it is a device"):
        refuse_pipe(Path("/dev/zero"))


def test_a_pipe_that_the_shell_made_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"model,rate_rps,slo_ms\n")
    os.close(writing)
    try:
        assert refuse_pipe(Path(f"/dev/fd/{reading}")).read_text() == "model,rate_rps,slo_ms\n"
    finally:
        os.close(reading)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "map.json"
    write_atomically(file, b"first")
    assert file.read_bytes() == b"first" and file.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, b"second")
    assert file.read_bytes() == b"first" and list(tmp_path.iterdir()) == [file]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"a map")
        assert pipe.is_fifo() and os.read(reading, 100) == b"a map"
    finally:
        os.close(reading)


def test_a_link_goes_on_leading_to_the_file_that_was_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("map.json")
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "link.json", content)
        assert (tmp_path / "link.json").is_symlink() and (tmp_path / "map.json").read_bytes() == content


def test_nothing_takes_the_place_of_a_device(tmp_path: Path) -> None:
    for path in (tmp_path / "new.onnx", tmp_path):
        assert refuse_to_replace(path) is path
    for path in (Path("/dev/null"), Path("/dev/full")):
        with pytest.raises(InputError, match=f"cannot write {path}: it is a device"):
            refuse_to_replace(path)
