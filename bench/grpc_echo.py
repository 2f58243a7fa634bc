"""A server of grpcio that gives back each message as it came; `bench.serving` runs it and compares.

    python -m bench.grpc_echo

It prints its port, and serves until it is ended.
"""

from __future__ import annotations

from typing import Any

import grpc
import uvloop


async def _echo(message: bytes, context: object) -> bytes:
    return message


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(_echo)


async def main() -> None:
    """Serve until ended."""
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
