"""What Triton's Python backend runs; ``config.pbtxt`` says on which file."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as backend

from bench.peers.peer_model import PeerModel


class TritonPythonModel:
    """The model behind the interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model, in each instance."""
        config = json.loads(args["model_config"])
        self._input, self._output = config["input"][0]["name"], config["output"][0]["name"]
        self._peer = PeerModel(config["parameters"]["path"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the model on the only input of each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        array = backend.get_input_tensor_by_name(request, self._input).as_numpy()
        return backend.InferenceResponse([backend.Tensor(self._output, self._peer.run_array(array))])
