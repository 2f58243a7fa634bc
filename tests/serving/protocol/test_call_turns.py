"""Whose calls begin first where grpcio is behind."""

from __future__ import annotations

import socket
import struct
import time

from gpuprof.serving.protocol.begun_question import QUESTION_PATH, BegunQuestion
from gpuprof.serving.protocol.call_turns import CallTurns
from gpuprof.serving.protocol.http2_frames import PREFACE
from gpuprof.serving.protocol.poller import Poller


class Connection:
    """A connection on which so many calls wait."""

    def __init__(self, turns: CallTurns, peer: str, calls: int) -> None:
        self.peer, self.calls, self.begun = peer, calls, 0
        self._turns = turns
        self.take_turn(turns.find_room(peer))

    def take_turn(self, room: int) -> None:
        count = min(room, self.calls)
        self.calls, self.begun = self.calls - count, self.begun + count
        if self.calls:
            self._turns.wait(self)
        self._turns.begin(count)


class Grpcio:
    """Answers questions when it is told to."""

    def __init__(self) -> None:
        self.questions = 0
        self.turns = CallTurns(self._ask)

    def _ask(self) -> None:
        self.questions += 1

    def answer(self) -> None:
        self.questions -= 1
        self.turns.note_answer()
        self.turns.give_turns()


def test_few_calls_are_with_grpcio_at_a_time_and_all_begin_in_the_end() -> None:
    grpcio = Grpcio()
    greedy = Connection(grpcio.turns, "greedy", 3000)
    most = greedy.begun
    assert most < 500
    before = most
    while greedy.calls:
        grpcio.answer()
        assert greedy.begun - before <= most
        before = greedy.begun
    assert greedy.begun == 3000


def test_a_client_waits_for_few_calls_of_each_other_client() -> None:
    grpcio = Grpcio()
    greedy = [Connection(grpcio.turns, f"greedy {number % 5}", 1000) for number in range(20)]
    before = sum(one.begun for one in greedy)
    modest = Connection(grpcio.turns, "modest", 1)
    while modest.calls:
        grpcio.answer()
    assert sum(one.begun for one in greedy) - before < 100


def test_connections_of_one_client_take_turns() -> None:
    grpcio = Grpcio()
    greedy = [Connection(grpcio.turns, "one", 1000) for _ in range(5)]
    modest = Connection(grpcio.turns, "one", 1)
    before = sum(one.begun for one in greedy)
    while modest.calls:
        grpcio.answer()
    assert sum(one.begun for one in greedy) - before < 100


def test_a_connection_that_has_gone_is_left_out() -> None:
    grpcio = Grpcio()
    first, second, third = (Connection(grpcio.turns, peer, 500) for peer in ("a", "a", "b"))
    for one in (second, third, third):
        grpcio.turns.forget(one)
    begun = second.begun, third.begun
    while first.calls:
        grpcio.answer()
    assert (second.begun, third.begun) == begun
    assert grpcio.turns.find_room("b") > 0


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(body) << 8 | kind, flags, stream) + body


class Asked:
    """The other end of a question's connections."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.answers = 0
        self.poller = Poller()
        self.question = BegunQuestion(self.poller, self._connect, self._note)

    def _connect(self) -> socket.socket:
        if len(self.ends) == 2:
            raise OSError
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.ends.append(theirs)
        return ours

    def _note(self) -> None:
        self.answers += 1

    def close(self) -> None:
        self.question.close()
        for end in self.ends:
            end.close()

    def say(self, text: bytes) -> None:
        self.ends[-1].sendall(text)
        self.poller.dispatch(0.0, 10)


def test_each_question_is_answered_once_and_by_the_end_of_its_connection_too() -> None:
    asked = Asked()
    for _ in range(3):
        asked.question.ask()
    asked.say(frame(4, 0, 0))
    sent = asked.ends[0].recv(10_000)
    assert sent.startswith(PREFACE) and sent.count(QUESTION_PATH.encode()) == 3
    asked.say(frame(1, 4, 1, b"abc")[:10])
    assert asked.answers == 0
    asked.say(frame(1, 4, 1, b"abc")[10:] + frame(1, 5, 1))
    assert asked.answers == 1
    asked.ends[0].close()
    asked.poller.dispatch(0.0, 10)
    assert asked.answers == 3
    asked.question.ask()
    asked.say(frame(4, 0, 0) + frame(1, 5, 1))
    assert asked.answers == 4 and len(asked.ends) == 2
    asked.ends[1].close()
    asked.poller.dispatch(0.0, 10)
    asked.question.ask()  # nobody listens
    assert asked.answers == 5
    asked.close()


def test_a_question_that_nobody_answers_is_given_up() -> None:
    asked = Asked()
    asked.question.ask()
    now = time.monotonic()
    asked.question.check(now + 1.0)
    assert asked.answers == 0
    asked.question.check(now + 60.0)
    assert asked.answers == 1 and asked.ends[0].recv(100) == b""
    asked.question.check(now + 120.0)
    assert asked.answers == 1
    asked.close()


def test_pings_are_answered_so_that_grpcio_may_stop() -> None:
    asked = Asked()
    asked.question.ask()
    asked.say(frame(4, 0, 0))
    asked.ends[0].recv(10_000)
    asked.say(frame(7, 0, 0, bytes(8)) + frame(6, 0, 0, b"whenever"))
    assert asked.ends[0].recv(10_000) == frame(6, 1, 0, b"whenever")
    asked.say(frame(6, 1, 0, b"whenever") + frame(1, 5, 1))
    asked.question.close()
    assert asked.ends[0].recv(10_000) == b"", "what answers a ping is not answered"
    asked.close()
