"""Transmission time of a message: ``a·x**b + c`` milliseconds for ``x`` bytes, with a, b, c by interval of size.

Source: Elvinger's thesis, section 4.6.2 (equation and intervals), with measurements between two machines up to 1 MB,
100 MB and 1 GB. The thesis prints a single fitted value: 8.7 ms for 9,633,792 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpuprof.errors import InputError
from gpuprof.simulator.trace import open_rows

#: Upper ends in bytes of the thesis's first two intervals; the third is unbounded.
INTERVALS = (1e6, 100e6)
_LEAST_POINTS = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """The function of an interval: ``a·x**b + c`` milliseconds up to ``upto_bytes``."""

    upto_bytes: float
    a: float
    b: float
    c: float


@dataclass(frozen=True, slots=True)
class NetworkDelay:
    """Expected transmission time by size of the message."""

    pieces: tuple[Piece, ...]

    def ms(self, payload_bytes: float) -> float:
        """Return the transmission time in milliseconds; 0 without a network."""
        for piece in self.pieces:
            if payload_bytes <= piece.upto_bytes:
                return float(max(0.0, piece.a * payload_bytes**piece.b + piece.c))
        return 0.0


#: No network between the router and the replicas.
LOCAL = NetworkDelay(())
#: Network of the thesis's two machines. The thesis does not print a, b and c: here c is its measured round trip
#: (0.322 ms), b is 1, and a yields its printed value, which is 9.2 Gbit/s.
THESIS = NetworkDelay((Piece(np.inf, (8.7 - 0.322) / 9_633_792, 1.0, 0.322),))


def fit_delay(payload_bytes: Sequence[float], latency_ms: Sequence[float]) -> NetworkDelay:
    """Return the least-squares fit to measurements, a function for each of the thesis's intervals with enough sizes.

    Raises `InputError` when no interval has three sizes, the minimum for three parameters.

    Parameters
    ----------
    payload_bytes, latency_ms : sequences of float of shape (measurements,)
    """
    x, y = np.asarray(payload_bytes, np.float64), np.asarray(latency_ms, np.float64)
    pieces, low = [], 0.0
    for high in (*INTERVALS, np.inf):
        mask = (x > low) & (x <= high)
        # ``low`` stays otherwise, so measurements of an interval with too few sizes are fitted with the next interval.
        if len(np.unique(x[mask])) >= _LEAST_POINTS:
            pieces.append(Piece(high, *_fit_piece(x[mask], y[mask])))
            low = high
    if not pieces:
        raise InputError("a network fit needs at least 3 message sizes within one interval", "measure more sizes")
    last = pieces[-1]
    return NetworkDelay((*pieces[:-1], Piece(np.inf, last.a, last.b, last.c)))


def _fit_piece(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return a, b and c by bounded least squares, for sizes relative to the largest: powers of bytes are too large."""
    from scipy.optimize import curve_fit

    largest = float(x.max())
    bounds = ([0.0, 0.1, 0.0], [np.inf, 3.0, np.inf])
    start = (float(np.ptp(y)), 1.0, float(y.min()))
    (a, b, c), _ = curve_fit(lambda part, a, b, c: a * part**b + c, x / largest, y, start, bounds=bounds)
    return float(a / largest**b), float(b), float(c)


def read_measurements(path: Path) -> NetworkDelay:
    """Return the fit to a CSV of ``payload_bytes,latency_ms``, a line per measurement.

    Raises `InputError` with the line for any other file.
    """
    rows = open_rows(path)
    line, header = next(rows, (1, []))
    if header != ["payload_bytes", "latency_ms"]:
        raise InputError(f"{path}:{line}: the header must be payload_bytes,latency_ms but is {','.join(header)!r}")
    sizes, times = [], []
    for line, row in rows:
        try:
            size, time = (float(cell) for cell in row)
        except ValueError:
            raise InputError(f"{path}:{line}: expected two numbers but got {','.join(row)!r}") from None
        if not (0 < size < np.inf and 0 <= time < np.inf):
            raise InputError(f"{path}:{line}: a size must be above 0 and a time at least 0 but got {','.join(row)!r}")
        sizes.append(size)
        times.append(time)
    return fit_delay(sizes, times)
