"""LitServe: ``python -m bench.peers.litserve_app MODEL WORKERS PORT``. Tensors travel as base64 in JSON."""

# Without the import that makes annotations strings: LitServe reads them.
import base64
import sys
from typing import Any

import litserve
from starlette.requests import Request
from starlette.responses import Response

from bench.peers.peer_model import PeerModel


class PeerApi(litserve.LitAPI):  # type: ignore[misc]
    """The model behind LitServe's calls."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def setup(self, device: str) -> None:
        """Load the model, in each worker."""
        self._model = PeerModel(self._path)

    def decode_request(self, request: Request) -> bytes:
        """Return the tensor's bytes; what is annotated so is the JSON of the request."""
        document: Any = request
        return base64.b64decode(document["data"])

    def predict(self, data: bytes) -> bytes:
        """Run the model."""
        return self._model.run(data)

    def encode_response(self, output: bytes) -> Response:
        """Return what becomes the JSON of the answer, whatever the annotation says."""
        document: Any = {"data": base64.b64encode(output).decode()}
        answer: Response = document
        return answer


if __name__ == "__main__":
    server = litserve.LitServer(
        PeerApi(sys.argv[1]), accelerator="cpu", workers_per_device=int(sys.argv[2]), fast_queue=True
    )
    server.run(host="127.0.0.1", port=int(sys.argv[3]), generate_client_file=False, log_level="warning")
