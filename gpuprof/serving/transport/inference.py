"""One inference in the server: the request, its deadline, and the callbacks for its answer."""

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
        When it makes sense to ask again.
    overloaded : bool
        Whether there was too much to do, rather than nobody to do it.
    allowed : str
        The methods that the address has, where that was what was wrong.
    reason : str
        As it is counted, a word or two; empty: "overload", or what the status is called.
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

    def forget_origin(self) -> None:
        """Forget where it arose: the frames there hold the request, for as long as somebody keeps the refusal."""
        self.__traceback__ = self.__context__ = self.__cause__ = None


def bad_request(message: str) -> RefusedError:
    """Return the refusal of an invalid request."""
    return RefusedError(HTTPStatus.BAD_REQUEST, message)


def out_of_memory() -> RefusedError:
    """Return the refusal of a request for whose tensors or answer there is no memory."""
    message = "the server has no memory left for this request"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, overloaded=True, reason="no memory")


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class InputTensor:
    """A tensor of a request."""

    shape: list[int]
    data: Buffer | tuple[int, int]  #: Bytes, or (offset, size): where in the arena it lies.


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class OutputTensor:
    """A tensor of an answer: the output's position, its shape and its bytes."""

    position: int
    shape: list[int]
    data: Buffer


@dataclass(slots=True)
class StageTimes:
    """Nanoseconds that an inference spent in each stage; the batch's own times count for each of its requests."""

    queue: int = 0
    gather: int = 0
    infer: int = 0
    scatter: int = 0


@dataclass(slots=True, eq=False)
class Inference:
    """What the router queues, sends to a worker and answers, exactly once."""

    rows: int  #: Of the batch; 1 for a model without a batch dimension.
    inputs: list[InputTensor]  #: In the order of the model's inputs.
    wanted: list[int] | None  #: Positions of the outputs that were asked for; None: all.
    arrived: float  #: Seconds on the loop's clock.
    deadline_ms: float  #: From the arrival on.
    #: ``on_done``, ``on_refused``: One of them is called, once.
    on_done: Callable[[Inference, list[OutputTensor], Slot | None], None]
    on_refused: Callable[[Inference, RefusedError], None]
    priority: int = 0  #: 0 is served first.
    slots: list[Slot] = field(default_factory=list)  #: Memory of the inputs, held until the answer.
    charged: int = 0  #: Bytes of inputs that lie elsewhere, which count until the answer, too.
    #: From the arrival to the answer, as it was expected when it was let in; corrected as its batch is sent.
    expected_ms: float = 0.0
    expected_rows: int = 0  #: What its batch was expected to hold then; 0: nothing was expected.
    attempts: int = 0  #: How often it was sent to a worker.
    deaths: int = 0  #: How many workers died while they ran it.
    alone: bool = False  #: It must not share a batch, because the last one that it was in failed.
    cancelled: bool = False
    output_slot: Slot | None = None
    sent: float = 0.0
    times: StageTimes = field(default_factory=StageTimes)
    batch_key: object = None
    #: What it was before it entered the queue of a merged replica, which alone knows what that is.
    member_request: object = None
    replica: str = ""  #: Where it was sent last.
    traceparent: str = ""  #: The client's span that it belongs to, as W3C Trace Context writes it; empty: none.
    client: str = ""  #: Who sent it; clients of a model share it fairly.
    start_tag: float = 0.0  #: Of fair queueing; see `gpuprof.serving.router.request_queue`.
    #: Others that came later go before it, so that it may miss its deadline though it was let in.
    overtaken: bool = False

    def charge_inputs(self, arena: Arena) -> None:
        """Count the inputs outside the arena towards its capacity, until `release`.

        Raises `RefusedError` when there is no memory for them.
        """
        size = sum([len(tensor.data) for tensor in self.inputs if type(tensor.data) is not tuple])
        if not arena.charge(size):
            raise out_of_memory()
        self.charged = size

    def release(self, arena: Arena) -> None:
        """Give the memory of the inputs back."""
        if self.slots:
            for slot in self.slots:
                arena.give_back(slot)
            self.slots = []
        if self.charged:
            arena.discharge(self.charged)
            self.charged = 0
