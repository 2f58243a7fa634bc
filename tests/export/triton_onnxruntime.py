"""ONNX Runtime as a backend of Triton written in Python, for servers without the compiled one.

Triton loads the class from ``onnxruntime/model.py`` in its directory of backends, for models whose configuration names
the backend ``onnxruntime``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as backend


class TritonPythonModel:
    """An instance of a model, with a thread of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model of the repository."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        file = Path(args["model_repository"], args["model_version"], "model.onnx")
        self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the requests that Triton joined as a batch."""
        names = [entry.name for entry in self._session.get_inputs()]
        arrays = {
            name: [backend.get_input_tensor_by_name(request, name).as_numpy() for request in requests] for name in names
        }
        outputs = self._session.run(None, {name: np.concatenate(parts) for name, parts in arrays.items()})
        ends = np.cumsum([len(part) for part in arrays[names[0]]])[:-1]
        results = zip(*(np.split(output, ends) for output in outputs), strict=True)
        labels = [entry.name for entry in self._session.get_outputs()]
        # By DLPack, since Triton's interpreter was built for NumPy 1 and takes arrays of NumPy 2 to be empty.
        return [
            backend.InferenceResponse([backend.Tensor.from_dlpack(*pair) for pair in zip(labels, parts, strict=True)])
            for parts in results
        ]
