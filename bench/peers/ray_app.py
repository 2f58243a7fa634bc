"""Ray Serve: ``python -m bench.peers.ray_app MODEL WORKERS PORT``. Tensors travel as the body."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import ray
from ray import serve

from bench.peers.peer_model import PeerModel


class PeerDeployment:
    """The model behind a deployment of Ray Serve."""

    def __init__(self, path: str) -> None:
        self._model = PeerModel(path)

    async def __call__(self, request: Any) -> Any:
        """Run the model on the body."""
        from starlette.responses import Response

        return Response(self._model.run(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=200 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[3])}, logging_config={"log_level": "ERROR"})
    make: Any = serve.deployment
    deployment = make(PeerDeployment).options(
        num_replicas=int(sys.argv[2]), max_ongoing_requests=32, ray_actor_options={"num_cpus": 1}
    )
    serve.run(deployment.bind(sys.argv[1]), logging_config={"log_level": "ERROR", "enable_access_log": False})
    while True:
        time.sleep(3600)
