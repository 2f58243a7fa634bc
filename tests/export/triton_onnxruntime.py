"""ONNX Runtime as a backend of Triton written in Python, for servers without the compiled one.

Triton loads the class from ``onnxruntime/model.py`` in its directory of backends, for models whose configuration names
the backend ``onnxruntime``.
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as backend

_set_destructor = ctypes.pythonapi.PyCapsule_SetDestructor
_set_destructor.argtypes = [ctypes.py_object, ctypes.c_void_p]


class TritonPythonModel:
    """An instance of a model, with as many threads as its configuration says, like the compiled backend.

    Instances are processes here and cannot have the common pool of threads: none spins instead.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model of the repository."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", {}).get("string_value", 0))
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
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
        return [
            backend.InferenceResponse([_make_tensor(*pair) for pair in zip(labels, parts, strict=True)])
            for parts in results
        ]


def _make_tensor(name: str, array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor by DLPack: Triton's interpreter was built for NumPy 1 and takes arrays of NumPy 2 to be empty."""
    capsule = array.__dlpack__()
    # Triton frees the tensor, and gives the capsule a name at which NumPy's destructor raises.
    _set_destructor(capsule, None)
    return backend.Tensor.from_dlpack(name, capsule)
