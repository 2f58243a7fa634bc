"""Everything at once: workers die and hang, maps change, clients break off; answers stay whole, memory comes back."""

import asyncio
import json
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, map_of, replica, running

pytestmark = serves_in_real_time

ITEMS = 2_000_000  # 8 MB: more than sockets hold, so that memory is held while tensors are on their way
SECONDS = 12.0
#: Of shared memory the router keeps 17 MB; code that it has read meanwhile and pieces of pages are about 25 MB.
KEPT_BYTES = 12 * 4 * ITEMS
#: Said of a request that was with three workers when they ended: it may be what ends them.
GIVEN_UP = "3 workers ended while they ran this request"
#: What a client may do: ask, break off within the tensor, break off before the answer, send slowly and read late.
ASK, APPLY_LAYOUTS, LEAVE, DAWDLE = range(4)


def identity(replicas: int, batch: int) -> dict[str, Any]:
    times_ms = [1.0 + 0.2 * rows for rows in range(batch)]
    entry = replica("m", sm_share_pct=20.0, batch=batch, batch_latency_ms=times_ms, max_wait_ms=1.0)
    return map_of({"m": "null:8m"}, [entry] * replicas, slo_ms=5000.0)


MAPS = [identity(2, 4), identity(1, 4), identity(3, 2), identity(2, 1)]


class Chaos:
    """Clients and accidents; ``count`` is what became of the requests, ``wrong`` what must not have."""

    def __init__(self, server: RunningServer, directory: Path) -> None:
        self.count: Counter[str] = Counter()
        self.wrong: list[object] = []
        self._server = server
        self._directory = directory
        self._random = random.Random(0)
        self._over = False

    async def run(self, seconds: float) -> None:
        doing = [self._ask_http] * 4 + [self._ask_grpc] * 2 + [self._hurt, self._change]
        tasks = [asyncio.ensure_future(self._again(action)) for action in doing]
        await asyncio.sleep(seconds)
        while not self.everything_happened and not any(task.done() for task in tasks):  # a slow machine takes longer
            await asyncio.sleep(0.1)
        self._over = True
        await asyncio.wait_for(asyncio.gather(*tasks), 120.0)

    @property
    def everything_happened(self) -> bool:
        """Whether each kind of answer and accident came more than once."""
        return all(self.count[what] >= 2 for what in ("http 200", "grpc answered", "grpc cancelled", "hurt", "changed"))

    async def _again(self, action: Callable[[], Awaitable[None]]) -> None:
        while not self._over:
            await action()

    def _tensor(self) -> Any:
        """Return a tensor that no other request has."""
        tensor = np.full((1, ITEMS), self._random.random(), np.float32)
        tensor[0, self._random.randrange(ITEMS)] = self._random.random()
        return tensor

    async def _ask_http(self) -> None:
        data = self._tensor().tobytes()
        entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, ITEMS]}
        text = json.dumps(
            {
                "inputs": [entry | {"parameters": {"binary_data_size": len(data)}}],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        head = (
            f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"Content-Length: {len(text) + len(data)}\r\n\r\n"
        )
        what = self._random.choice([ASK, ASK, ASK, APPLY_LAYOUTS, LEAVE, DAWDLE])
        connection = self._server.connect()
        if what == DAWDLE:  # what it does not read has no room but in the server
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            writer.write(head.encode() + text)
            await self._send(writer, data, what)
            if what in (APPLY_LAYOUTS, LEAVE):
                writer.transport.abort()
            else:
                await asyncio.sleep(0.3 * self._random.random() if what == DAWDLE else 0.0)
                await self._read_answer(reader, data)
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes, what: int) -> None:
        if what == APPLY_LAYOUTS:
            writer.write(data[: self._random.randrange(len(data))])
        elif what == DAWDLE:
            for begin in range(0, len(data), len(data) // 6):
                writer.write(data[begin : begin + len(data) // 6])
                await asyncio.sleep(0.05 * self._random.random())
        else:
            writer.write(data)
        await writer.drain()
        if what == LEAVE:
            await asyncio.sleep(0.01 * self._random.random())

    async def _read_answer(self, reader: asyncio.StreamReader, data: bytes) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        body = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        self.count[f"http {status}"] += 1
        if status == 500 and GIVEN_UP in body.decode():
            self.count["given up"] += 1
        elif status not in (200, 503):
            self.wrong.append((status, body))
        elif status == 200 and body[-len(data) :] != data:
            self.wrong.append("an answer over HTTP is another's")

    async def _ask_grpc(self) -> None:
        address = next(word for word in self._server.line.split() if word.startswith("grpc://"))
        async with triton_aio.InferenceServerClient(address.removeprefix("grpc://")) as client:
            for _ in range(20):
                if self._over:  # where little of a core is left, each of the others takes seconds
                    break
                tensor = self._tensor()
                given = triton.InferInput("INPUT0", list(tensor.shape), "FP32")
                given.set_data_from_numpy(tensor)
                asking = asyncio.ensure_future(client.infer("m", [given]))
                if self._random.random() < 0.2:
                    await asyncio.sleep(0.01 * self._random.random())
                    asking.cancel()
                try:
                    answer = await asking
                except asyncio.CancelledError:
                    if (task := asyncio.current_task()) is not None and task.cancelling():  # the time is up
                        raise
                    self.count["grpc cancelled"] += 1
                except InferenceServerException as error:
                    self.count["grpc refused"] += 1
                    self.count["given up"] += GIVEN_UP in str(error)
                    if not any(word in str(error) for word in ("no worker", "overloaded", GIVEN_UP)):
                        self.wrong.append(str(error))
                else:
                    self.count["grpc answered"] += 1
                    if not np.array_equal(answer.as_numpy("OUTPUT0"), tensor):
                        self.wrong.append("an answer over gRPC is another's")

    async def _hurt(self) -> None:
        """Kill a worker, or stop it, so that it hangs."""
        await asyncio.sleep(self._random.uniform(0.3, 1.5))
        workers = self._server.workers()
        if workers:
            how = self._random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            worker = self._random.choice(workers)
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(how)
                self.count["hurt"] += 1
            if how == signal.SIGSTOP:  # one that still loads is waited for, however long that takes
                asyncio.get_running_loop().call_later(6.0, _resume, worker)

    async def _change(self) -> None:
        await asyncio.sleep(self._random.uniform(1.0, 2.0))
        path = self._directory / "new.json"
        path.write_text(json.dumps(self._random.choice(MAPS)))
        command = [sys.executable, "-m", "gpuprof", "apply", str(path), "--port", str(self._server.port)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        stderr, _ = await process.communicate()
        self.count["changed"] += process.returncode == 0
        if process.returncode:
            self.wrong.append(stderr.decode())


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


@pytest.mark.slow
def test_whatever_happens_no_answer_is_another_s_and_all_memory_comes_back(tmp_path: Path) -> None:
    with running(tmp_path, MAPS[0], "--grpc-port", "0", "--hang-s", "2") as server:
        router = psutil.Process(server.process.pid)
        before = router.memory_info().rss
        chaos = Chaos(server, tmp_path)
        asyncio.run(asyncio.wait_for(chaos.run(SECONDS), 240.0))
        assert chaos.wrong == []
        assert chaos.count["given up"] <= chaos.count["hurt"]
        assert eventually(lambda: b"\ngpuprof_buffer_bytes 0.0\n" in server.get("/metrics")[1])
        # What is free returns to the system once nobody asks anything: what a dozen requests left would be too much.
        assert eventually(lambda: router.memory_info().rss < before + KEPT_BYTES, 60.0), router.memory_info()
        code, errors = server.stop()
    assert code == 0 and "Traceback" not in errors
