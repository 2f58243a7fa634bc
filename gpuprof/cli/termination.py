"""Handles termination signals like Ctrl-C, so that everything started for a verb, daemons too, is stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gpuprof.placement.limit import end_searches

#: Seconds within which a repeated signal is ignored: programs that signal a process group signal its leader, too
#: (timeout does).
_SAME_WORD_S = 1.0
_WORDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, and SIGHUP unless ignored, like SIGINT, or as an interrupt where SIGINT is ignored.

    Raises `KeyboardInterrupt`: within the context, on such a signal when SIGINT has no handler of its own.
    """
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told_s = [-_SAME_WORD_S]

    def handle_signal(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - told_s[0] < _SAME_WORD_S:
            return
        told_s[0] = now_s
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not end_searches:
            signal.raise_signal(signal.SIGINT)
        else:  # SIGINT is ignored, as for background jobs of a shell, or would only end a search
            raise KeyboardInterrupt

    before = {word: signal.getsignal(word) for word in _WORDS}
    # Only default handlers are replaced: nohup ignores SIGHUP, and a test may have a handler of its own.
    signals = [word for word, handler in before.items() if handler is signal.SIG_DFL]
    for word in signals:
        signal.signal(word, handle_signal)
    try:
        yield
    finally:
        for word in signals:
            signal.signal(word, before[word])
