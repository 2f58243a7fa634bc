"""Names of what runs models: ONNX Runtime's execution providers, and PyTorch where those cannot use a GPU."""

from __future__ import annotations

ORT_CPU, ORT_CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TORCH_CPU, TORCH_CUDA = "TorchCPU", "TorchCUDA"
TORCH_PROVIDERS = (TORCH_CPU, TORCH_CUDA)
GPU_PROVIDERS = (ORT_CUDA, TORCH_CUDA)

#: Begins the name of the range around an operator that PyTorch runs; the name of its first output follows.
NODE_RANGE = "gpuprof-node:"

#: Where a client of MPS finds its daemon: an environment variable.
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
#: How many SMs a session of PyTorch is to keep to, by a green context: an environment variable.
GREEN_SMS = "GPUPROF_GREEN_CONTEXT_SMS"
