"""Names of ONNX Runtime's execution providers."""

from __future__ import annotations

ORT_CPU, ORT_CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

#: Where a client of MPS finds its daemon: an environment variable.
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
