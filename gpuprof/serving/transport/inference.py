"""An inference in the server: the request, its deadline, and the callbacks for its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.wire import Buffer


class RefusedError(Exception):
    """The server refuses a request, with the reason.

    Parameters
    ----------
    retry_after_s : float or None
        Time after which a retry makes sense.
    overloaded : bool
        Whether the cause is overload, rather than a missing worker.
    allowed : str
        Allowed methods of the address, if the method was wrong.
    reason : str
        Label for counting, a word or two; empty: "overload", or the name of the status.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        retry_after_s: float | None = None,
        *,
        overloaded: bool = False,
        allowed: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason or ("overload" if overloaded else status.phrase.lower())
        self.overloaded = overloaded
        self.allowed = allowed
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


def bad_request(message: str) -> RefusedError:
    """Return the refusal of an invalid request."""
    return RefusedError(HTTPStatus.BAD_REQUEST, message)


def out_of_memory() -> RefusedError:
    """Return the refusal of a request without memory for its tensors or its answer."""
    message = "the server has no memory left for this request"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, overloaded=True, reason="no memory")


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class InputTensor:
    """A tensor of a request."""

    shape: list[int]
    data: Buffer | tuple[int, int]  #: Bytes, or (offset, size) in the arena.


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class OutputTensor:
    """A tensor of an answer: the output's position, its shape and its bytes."""

    position: int
    shape: list[int]
    data: Buffer


@dataclass(slots=True)
class StageTimes:
    """Nanoseconds of an inference in each stage; the batch's stages count for each of its requests."""

    queue: int = 0
    gather: int = 0
    infer: int = 0
    scatter: int = 0


@dataclass(eq=False)  # without slots, initial values stay in the class: a request sets few of them
class Inference:
    """A request in the router, which is queued, sent to a worker and answered exactly once."""

    rows: int  #: Batch rows; 1 for a model without a batch dimension.
    inputs: list[InputTensor]  #: Tensors in the order of the model's inputs.
    wanted: list[int] | None  #: Positions of the requested outputs; None: all.
    arrived: float  #: Seconds on the loop's clock.
    deadline_ms: float  #: Time limit, counted from the arrival.
    #: ``on_done``, ``on_refused``: Exactly one of them is called, once.
    on_done: Callable[[Inference, list[OutputTensor], Slot | None], None]
    on_refused: Callable[[RefusedError], None]
    priority: int = 0  #: 0 is served first.
    slot: Slot | None = None  #: Memory of the inputs, held until the answer.
    batch_key: object = None  #: Requests with equal keys can share a batch.
    traceparent: str = ""  #: The client's parent span, in the format of W3C Trace Context; empty: none.
    client: str = ""  #: Client, for fair sharing of a model.
    #: Expected time from arrival to answer, at admission; corrected when its batch is sent.
    expected_ms: float = field(default=0.0, init=False)
    expected_rows: int = field(default=0, init=False)  #: Expected rows of its batch at admission; 0: none expected.
    attempts: int = field(default=0, init=False)  #: Number of times sent to a worker.
    deaths: int = field(default=0, init=False)  #: Number of workers that died while they ran the request.
    #: True if the request must not share a batch, because its last batch failed.
    alone: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    output_slot: Slot | None = field(default=None, init=False)
    sent: float = field(default=0.0, init=False)
    times: StageTimes = field(init=False, repr=False)  #: Set with the answer.
    replica: str = field(default="", init=False)  #: Replica to which it was last sent.
    #: Start tag of fair queueing; see `gpuprof.serving.router.request_queue`.
    start_tag: float = field(default=0.0, init=False)
    #: True if later requests go first, so that this request may miss its deadline though admitted.
    overtaken: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Note that the client has disconnected: the request is dropped if it still waits."""
        self.cancelled = True

    def release(self, arena: Arena) -> None:
        """Give the memory of the inputs back."""
        if self.slot is not None:
            arena.give_back(self.slot)
            self.slot = None
