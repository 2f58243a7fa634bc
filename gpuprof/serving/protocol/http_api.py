"""The Open Inference Protocol over HTTP: which address answers what."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from gpuprof.serving.protocol.body_receiver import DISCARD_BYTES
from gpuprof.serving.protocol.body_turns import BodyTurns
from gpuprof.serving.protocol.connection_set import ConnectionSet, find_most_connections
from gpuprof.serving.protocol.http_connection import SCRATCH_BYTES, HttpConnection
from gpuprof.serving.protocol.http_descriptions import HttpDescriptions
from gpuprof.serving.protocol.http_message import (
    CONTENT_BINARY,
    CONTENT_JSON,
    HttpHead,
    find_authorization,
    find_coding,
    is_own_host,
)
from gpuprof.serving.protocol.http_route import HttpClient, ReceivedBody, Route, allow_only
from gpuprof.serving.protocol.incoming_request import KnownHead, find_json_length
from gpuprof.serving.protocol.infer_response import write_response
from gpuprof.serving.protocol.large_texts import place_inputs, read_large_request, write_large_response
from gpuprof.serving.protocol.loop_turns import DiscardTurns, LoopTurns
from gpuprof.serving.protocol.parse_pool import ON_LOOP_BYTES, ParsePool, refuse_long_text
from gpuprof.serving.protocol.protocol_figures import ProtocolFigures, RelayFigures
from gpuprof.serving.protocol.record_turns import RecordTurns
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_urgency
from gpuprof.serving.router.router import Router, find_batch_key, find_deadline_ms
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, bad_request, out_of_memory
from gpuprof.serving.transport.inflating import Inflater, is_compressed
from gpuprof.serving.transport.server_timing import write_timing
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.stalls import StallMeter

_MAX_CACHED_ROUTES = 1024
_MAX_TARGET_BYTES = 4096
#: Of a request, in which its address and token are looked for before it is read.
_MAX_BEGINNING_BYTES = 1024
#: A large body that has waited for so much of the SLO to be received lets later ones go first.
_LIFO_AFTER_SLOS = 0.5
_PUBLIC_PREFIX = b"/v2/health/"


class HttpApi:
    """Answers the requests of all connections.

    Parameters
    ----------
    router : Router
    max_body_bytes : int
        Of an inference request.
    admits : callable
        Whether the value of an Authorization header lets a request in; whether the server lives and is ready is told
        to everybody.
    own_hosts : collection of str or None
        The names by which the server may be asked for, beside addresses and names without a dot; None: any. A page that
        a browser shows can reach a server of its machine by a name of its own (DNS rebinding).
    connections_per_peer : int
        That one address may have.
    stalls : StallMeter or None
        Told in the metrics and with readiness.

    Attributes
    ----------
    turned_away_elsewhere : callable
        Returns how many connections and calls of other protocols addresses had too many.
    find_relay_figures : callable
        Returns how the relay of gRPC has fared; None: there is none.
    """

    def __init__(
        self,
        router: Router,
        max_body_bytes: int,
        admits: Callable[[bytes], bool] = lambda authorization: True,
        own_hosts: Collection[str] | None = None,
        connections_per_peer: int = 2048,
        stalls: StallMeter | None = None,
    ) -> None:
        self.router = router
        self.arena = router.arena
        self.scratch, self.discard_buffer = bytearray(SCRATCH_BYTES), bytearray(DISCARD_BYTES)
        self.connections = ConnectionSet[HttpConnection](connections_per_peer, find_most_connections())
        self.bodies, self.discards, self.records = BodyTurns(), DiscardTurns(), RecordTurns()
        self.turns = LoopTurns(held=self.bodies.crowded)
        self.known_heads: dict[bytes, KnownHead] = {}
        self._own_hosts = own_hosts
        self._refusals: Counter[tuple[str, int, str]] = Counter()
        self.pool = ParsePool()
        self.turned_away_elsewhere: Callable[[], int] = lambda: 0
        self.find_relay_figures: Callable[[], RelayFigures | None] = lambda: None
        self._stalls = StallMeter(time.monotonic()) if stalls is None else stalls
        self._descriptions = HttpDescriptions(router, self._find_figures)
        self._parsing: set[asyncio.Task[None]] = set()
        self._max_body_bytes = max_body_bytes
        self._inflater = Inflater(self, max_body_bytes, HTTPStatus.BAD_REQUEST)
        self._admits = admits
        self._routes: dict[tuple[bytes, bytes], Route] = {}

    @property
    def draining(self) -> bool:
        """Whether answers say that the connection closes."""
        return self.router.draining

    def find_route(self, head: HttpHead) -> Route:
        """Return what answers a request; found once for each address.

        Raises
        ------
        RefusedError
            401 without the token, 404 for an address that there is not, 405 for a method that it does not have, 421
            for another server's name.
        """
        if self._own_hosts is not None and not is_own_host(head.headers.get(b"host", b""), self._own_hosts):
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "the header Host names another server")
        if not self._admits(head.headers.get(b"authorization", b"")) and not head.target.startswith(_PUBLIC_PREFIX):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the request does not have the token of this server")
        key = (head.method, head.target)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._find_path(head)
            if len(self._routes) > _MAX_CACHED_ROUTES:
                # Anybody can ask for addresses without end; those of models must find a place, and with it a lane.
                del self._routes[next(iter(self._routes))]
        return route

    def find_lane(self, beginning: Buffer) -> Hashable:
        """Return the lane of a request that begins so: its model's, if it has the token and its address came before."""
        text = bytes(memoryview(beginning)[:_MAX_BEGINNING_BYTES])
        words = text.split(b" ", 2)
        route = self._routes.get((words[0], words[1])) if len(words) > 2 else None
        # Who is not let in anyway takes no turns from those who are.
        return None if route is None or not self._admits(find_authorization(text)) else route.lane

    def forget_routes(self) -> None:
        """Find every address anew: the models have changed."""
        self._routes.clear()
        self.known_heads.clear()

    def _find_path(self, head: HttpHead) -> Route:
        if len(head.target) > _MAX_TARGET_BYTES:
            raise RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        path = head.target.split(b"?", 1)[0].decode("latin-1")
        words = [unquote(word) for word in path.strip("/").split("/")]
        method = "GET" if head.method == b"HEAD" else head.method.decode("latin-1")
        match words:
            case ["v2", "models", name, "infer"]:
                return allow_only("POST", method, self._infer_route(self.router.find(name, "")))
            case ["v2", "models", name, "versions", version, "infer"]:
                return allow_only("POST", method, self._infer_route(self.router.find(name, version)))
        route = self._descriptions.find(words, method)
        if route is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:100]!r}")
        return route

    def _infer_route(self, model: ServedModel) -> Route:
        # Traced requests are never refused early, so that those that came first would wait without end.
        lifo_after_s = math.inf if model.tracer is not None else _LIFO_AFTER_SLOS * model.slo_ms / 1000.0
        infer, refuse_early = partial(self._infer, model), partial(_refuse_early, model)
        return Route(infer, self._max_body_bytes, True, refuse_early, lane=model.name, lifo_after_s=lifo_after_s)

    def _find_figures(self) -> ProtocolFigures:
        turned_away = self.connections.turned_away + self.turned_away_elsewhere()
        return ProtocolFigures(self._refusals, turned_away, self._stalls, self.find_relay_figures())

    def count_refusal(self, refusal: RefusedError, protocol: str = "http") -> None:
        """Count an answer that says no, by its protocol, status and reason."""
        self._refusals[protocol, refusal.status.value, refusal.reason] += 1

    def _infer(self, model: ServedModel, connection: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
        slots = [] if received.slot is None else [received.slot]
        if find_coding(head) is not None:
            if not is_compressed(received.body.data):
                self._refuse(connection, bad_request("the body is not compressed as its headers say"), slots)
                return
            gone: list[bool] = []
            connection.on_disconnect = lambda: gone.append(True)
            self._start_task(self._infer_compressed(model, connection, head, received, gone))
            return
        try:
            refuse_long_text(received.body.json_bytes)
            if received.body.json_bytes > ON_LOOP_BYTES:
                self._start_task(self._infer_in_pool(model, connection, head, received))
                return
            request = model.read_request(received.body)
        except RefusedError as refusal:
            self._refuse(connection, refusal, slots)
        else:
            self._submit(model, connection, head, request, slots, received.arrived)

    def _refuse(self, connection: HttpClient, refusal: RefusedError, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.arena.give_back(slot)
        connection.refuse(refusal)

    def _submit(
        self,
        model: ServedModel,
        connection: HttpClient,
        head: HttpHead,
        asked: InferRequest,
        slots: list[Slot],
        arrived: float,
    ) -> None:
        """Submit a request; one that is refused gives its slots back."""
        try:
            inference = Inference(
                rows=asked.rows,
                inputs=asked.inputs,
                wanted=asked.outputs,
                arrived=arrived,
                deadline_ms=find_deadline_ms(model, asked),
                on_done=partial(self._answer_request, model, connection, asked),
                on_refused=lambda _, refusal: connection.refuse(refusal),
                priority=asked.priority,
                slots=slots,
                batch_key=find_batch_key(model, asked),
                traceparent=head.headers.get(b"traceparent", b"").decode("latin-1"),
                client=connection.peer,
            )
            model.submit(inference)
        except RefusedError as refusal:
            self._refuse(connection, refusal, slots)
            return
        connection.on_disconnect = partial(_cancel, inference)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._parsing.add(task)
        task.add_done_callback(self._parsing.discard)

    async def _infer_in_pool(
        self, model: ServedModel, connection: HttpClient, head: HttpHead, received: ReceivedBody
    ) -> None:
        """Submit a request whose text is read in another process."""
        gone: list[bool] = []
        connection.on_disconnect = lambda: gone.append(True)
        body, slots = received.body, [] if received.slot is None else [received.slot]
        try:
            async with self.pool.turn(connection.peer):
                request = await self.pool.run(read_large_request, model.spec, bytes(body.data), body.json_bytes)
            placed, own_slots = place_inputs(request, self.arena)
        except RefusedError as refusal:
            self._refuse(connection, refusal, slots)
            return
        for slot in slots:
            self.arena.give_back(slot)
        if gone:
            for slot in own_slots:
                self.arena.give_back(slot)
        else:
            self._submit(model, connection, head, placed, own_slots, received.arrived)

    async def _infer_compressed(
        self, model: ServedModel, connection: HttpClient, head: HttpHead, received: ReceivedBody, gone: list[bool]
    ) -> None:
        """Submit a request whose body is compressed; ``gone`` is not empty once its client has disconnected."""
        size = 0
        try:
            data = await self._inflate(received, connection.peer)
            size = len(data)
            body = RequestBody(data, find_json_length(head, size))
            refuse_long_text(body.json_bytes)
            if body.json_bytes > ON_LOOP_BYTES:
                async with self.pool.turn(connection.peer):
                    request = await self.pool.run(read_large_request, model.spec, bytes(data), body.json_bytes)
            else:
                request = model.read_request(body)
            placed, slots = place_inputs(request, self.arena)
        except RefusedError as refusal:
            connection.refuse(refusal)
            return
        finally:
            self.release(size)
        if gone:
            for slot in slots:
                self.arena.give_back(slot)
        else:
            self._submit(model, connection, head, placed, slots, received.arrived)

    async def _inflate(self, received: ReceivedBody, client: str) -> Buffer:
        """Return what a body was compressed from, and give its own memory back."""
        try:
            return await self._inflater.inflate(received.body.data, client)
        finally:
            if received.slot is not None:
                self.arena.give_back(received.slot)

    def charge(self, size: int) -> None:
        """Count ``size`` bytes that were inflated. Raises `RefusedError` when there is no memory for them."""
        if not self.arena.charge(size):
            raise out_of_memory()

    def release(self, size: int) -> None:
        """Count ``size`` bytes no longer that were inflated."""
        self.arena.discharge(size)

    def _answer_request(
        self,
        model: ServedModel,
        connection: HttpClient,
        asked: InferRequest,
        inference: Inference,
        outputs: list[OutputTensor],
        slot: Slot | None,
    ) -> None:
        if _text_bytes(asked, outputs) > ON_LOOP_BYTES:
            self._start_task(self._answer_in_pool(model, connection, asked, inference, outputs, slot))
            return
        try:
            text, tensors = write_response(model.spec, asked, outputs)
        except RefusedError as refusal:
            self._refuse(connection, refusal, [] if slot is None else [slot])
        else:
            self._answer(connection, inference, text, tensors, slot)

    def _answer(
        self, connection: HttpClient, inference: Inference, text: bytes, tensors: list[Buffer], slot: Slot | None
    ) -> None:
        """Send an answer; what of it is large lies in the arena until it is sent."""
        extra = write_timing(inference.times, time.monotonic() - inference.arrived)
        if tensors:
            extra += b"Inference-Header-Content-Length: %d\r\n" % len(text)
            connection.respond(200, CONTENT_BINARY, text, tensors, slot, extra)
            return
        if slot is not None:
            self.arena.give_back(slot)  # the text is all there is
        if len(text) <= INLINE_BYTES:
            connection.respond(200, CONTENT_JSON, text, extra=extra)
        elif (own_slot := self.arena.take(len(text))) is None:
            connection.refuse(out_of_memory())
        else:
            view = self.arena.view(own_slot.offset, len(text))
            view[:] = text
            connection.respond(200, CONTENT_JSON, b"", [view], own_slot, extra)

    async def _answer_in_pool(
        self,
        model: ServedModel,
        connection: HttpClient,
        asked: InferRequest,
        inference: Inference,
        outputs: list[OutputTensor],
        slot: Slot | None,
    ) -> None:
        """Answer with large tensors as JSON, written in another process."""
        copied = [OutputTensor(output.position, output.shape, bytes(output.data)) for output in outputs]
        size = sum(len(output.data) for output in copied)
        if slot is not None:
            self.arena.give_back(slot)
        try:
            self.charge(size)
        except RefusedError as refusal:
            connection.refuse(refusal)
            return
        try:
            async with self.pool.turn(connection.peer):
                text, tensors = await self.pool.run(write_large_response, model.spec, asked, copied)
        except RefusedError as refusal:
            connection.refuse(refusal)
        else:
            self._answer(connection, inference, text, tensors, None)
        finally:
            self.release(size)


def _text_bytes(asked: InferRequest, outputs: list[OutputTensor]) -> int:
    """Return how many bytes of tensors an answer has as JSON."""
    if asked.binary is None:
        return 0
    return sum(len(output.data) for output in outputs if output.position not in asked.binary)


def _refuse_early(model: ServedModel, text: Buffer, client: str, waited_ms: float) -> None:
    """Refuse a request whose tensors have not come yet if it could not be answered in time."""
    model.refuse_early(partial(read_urgency, text), client, waited_ms)


def _cancel(inference: Inference) -> None:
    inference.cancelled = True
