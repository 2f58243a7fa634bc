"""Names of ONNX Runtime's execution providers."""

from __future__ import annotations

ORT_CPU, ORT_CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

#: Environment variable with the pipe directory of the MPS daemon, read by MPS clients.
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
