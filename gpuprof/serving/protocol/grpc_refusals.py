"""How a call of gRPC that is refused ends."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NoReturn

import grpc

from gpuprof.serving.transport.inference import RefusedError

_STATUSES = {
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


async def end_call(context: Any, refusal: RefusedError) -> NoReturn:
    """End a call with the status that stands for a refusal."""
    code = _STATUSES.get(refusal.status, grpc.StatusCode.INTERNAL)
    if refusal.overloaded:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers: tuple[tuple[str, str], ...] = ()
    if refusal.retry_after_s is not None:
        # gRFC A6: a client that retries by its service config waits so long.
        trailers = (("grpc-retry-pushback-ms", str(int(1000 * refusal.retry_after_s) + 1)),)
    await context.abort(code, refusal.message, trailers)
    raise AssertionError("a call that was aborted goes on")
