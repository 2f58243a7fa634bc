"""Execution of models: ONNX Runtime, PyTorch, and inputs that may share a batch."""
