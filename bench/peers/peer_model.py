"""The model that a peer serves: an ONNX file in ONNX Runtime with one thread, or the identity ``null:BYTES``.

Peers import this in environments where gpuprof is not installed, so it imports nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class PeerModel:
    """Takes and gives a float32 tensor as bytes.

    Parameters
    ----------
    path : str
    """

    def __init__(self, path: str) -> None:
        self._session: Any = None
        self.shape: list[int] = [1, -1]
        if path.startswith("null:"):
            return
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (entry,) = self._session.get_inputs()
        self._name = entry.name
        self.shape = [size if isinstance(size, int) else 1 for size in entry.shape]

    def run(self, data: bytes) -> bytes:
        """Return the output's bytes."""
        return bytes(self.run_array(np.frombuffer(data, np.float32).reshape(self.shape)).data)

    def run_array(self, array: Any) -> Any:
        """Return the output for an array of `shape`."""
        if self._session is None:
            return array
        return np.ascontiguousarray(self._session.run(None, {self._name: array})[0])
