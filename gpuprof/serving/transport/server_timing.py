"""The header Server-Timing: the times of an answer's stages. Source: W3C, Server Timing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gpuprof.serving.transport.inference import StageTimes

NAME = b"server-timing"
#: Time of a server that does not report it.
UNKNOWN_MS = -1.0
_METRICS = (b"queue", b"infer", b"total")


def write_timing(times: StageTimes, total_s: float) -> bytes:
    """Return the header line of an answer: ms in the queue, in the model, and in the server in total."""
    queue_ms, infer_ms = times.queue / 1e6, times.infer / 1e6
    return b"Server-Timing: queue;dur=%.3f, infer;dur=%.3f, total;dur=%.3f\r\n" % (queue_ms, infer_ms, 1e3 * total_s)


class ServerTimes(NamedTuple):
    """Times that a server reports for an answer, ms; `UNKNOWN_MS` where they are missing."""

    queue_ms: float = UNKNOWN_MS  #: Waiting for a batch.
    infer_ms: float = UNKNOWN_MS  #: The model.
    total_ms: float = UNKNOWN_MS


def read_times(value: bytes) -> ServerTimes:
    """Return the times in ``value``, the ``Server-Timing`` header in lower case; unknown metrics are ignored."""
    times = dict.fromkeys(_METRICS, UNKNOWN_MS)
    for metric in value.split(b","):
        name, *parameters = (part.strip() for part in metric.split(b";"))
        if name not in times:
            continue
        for parameter in parameters:
            key, _, text = parameter.partition(b"=")
            if key.strip() == b"dur":
                with suppress(ValueError):
                    duration_ms = float(text.strip(b' "'))
                    times[name] = duration_ms if 0.0 <= duration_ms < float("inf") else UNKNOWN_MS
    return ServerTimes(*times.values())
