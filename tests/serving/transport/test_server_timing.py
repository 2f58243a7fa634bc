"""What an answer says of where its time went, as it is written and as it is read."""

from __future__ import annotations

import pytest

from gpuprof.serving.transport.inference import StageTimes
from gpuprof.serving.transport.server_timing import UNKNOWN_MS, ServerTimes, read_times, write_timing


def test_what_is_written_is_what_is_read() -> None:
    line = write_timing(StageTimes(queue=1_500_000, infer=2_250_000), 0.0042)
    assert line == b"Server-Timing: queue;dur=1.500, infer;dur=2.250, total;dur=4.200\r\n"
    name, _, value = line.lower().partition(b":")
    assert name == b"server-timing" and read_times(value.strip()) == ServerTimes(1.5, 2.25, 4.2)


@pytest.mark.parametrize(
    ("value", "total_ms"),
    [
        (b'total;desc="all of it";dur="7.5"', 7.5),
        (b" db;dur=3 , total ; dur = 4", 4.0),
        (b"cache;desc=hit, db;dur=3", UNKNOWN_MS),
        (b"total", UNKNOWN_MS),
        (b"total;dur=soon", UNKNOWN_MS),
        (b"total;dur=nan", UNKNOWN_MS),
        (b"total;dur=-3", UNKNOWN_MS),
        (b"", UNKNOWN_MS),
    ],
)
def test_only_a_total_that_can_be_one_is_read_from_other_servers(value: bytes, total_ms: float) -> None:
    assert read_times(value) == ServerTimes(total_ms=total_ms)
