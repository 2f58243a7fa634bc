"""When the router's garbage is collected: Python looks at every object for what is left in cycles.

With thousands of open calls that takes 100 ms and more, in which nothing else is done, and Python does it by itself in
the middle of serving, the sooner the more calls begin. What lives for a short time is still collected by Python.
"""

from __future__ import annotations

import gc

from gpuprof.serving.watch.memory import private_bytes

#: Collections of the middle generation after which Python collects all: as is its own rule.
_PENDING = 10
_NEVER = (1 << 31) - 1
#: With so many calls and connections, of some eighty objects each, a collection takes 20 to 40 ms.
_FEW = 1000
#: With more, memory may grow by so much, and so much for each of them, before all is collected in any case.
_GROWN_BYTES, _EACH_BYTES = 64 << 20, 40 << 10


class GarbageCollection:
    """Collects all garbage of the process when few calls and connections are open, or memory grows.

    Examples
    --------
    >>> garbage = GarbageCollection()
    >>> garbage.start()                  # Python no longer collects all by itself
    >>> garbage.collect(open_count=3)    # every second or so
    >>> garbage.stop()
    """

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._kept_bytes = 0

    def start(self) -> None:
        """Collect all and leave what exists out of later collections; from now on `collect` decides when."""
        first, second, _ = self._thresholds
        gc.set_threshold(first, second, _NEVER)
        self._collect()
        gc.freeze()

    def collect(self, open_count: int) -> None:
        """Collect all where enough is there to be collected; called periodically.

        ``open_count``: calls and connections that are open.
        """
        if gc.get_count()[2] < _PENDING:
            return
        most_bytes = self._kept_bytes + _GROWN_BYTES + _EACH_BYTES * open_count
        if open_count <= _FEW or private_bytes() > most_bytes:
            self._collect()

    def stop(self) -> None:
        """Leave it to Python again."""
        gc.set_threshold(*self._thresholds)

    def _collect(self) -> None:
        gc.collect()
        self._kept_bytes = private_bytes()
