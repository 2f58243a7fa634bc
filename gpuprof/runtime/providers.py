"""Names of ONNX Runtime's execution providers."""

from __future__ import annotations

ORT_CPU, ORT_CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
ORT_TENSORRT = "TensorrtExecutionProvider"

#: Environment variable that selects the options of sessions on a GPU: `gpuprof.runtime.gpu_session.GpuChoice`.
GPU_OPTIONS = "GPUPROF_GPU_OPTIONS"

#: Environment variable with the pipe directory of the MPS daemon, read by MPS clients.
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
