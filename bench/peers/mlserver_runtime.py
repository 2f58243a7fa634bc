"""MLServer: what its models are served by, named in ``model-settings.json``."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from bench.peers.peer_model import PeerModel


class PeerRuntime(MLModel):  # type: ignore[misc]
    """The model behind a runtime of MLServer."""

    async def load(self) -> bool:
        """Load the model, in each worker."""
        self._peer = PeerModel(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run the model on the only input."""
        (entry,) = payload.inputs
        array = NumpyCodec.decode_input(entry).astype("float32", copy=False)
        shape = array.shape if -1 in self._peer.shape else self._peer.shape
        output = self._peer.run_array(array.reshape(shape))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", output)])
