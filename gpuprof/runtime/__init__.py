"""How a model is run: ONNX Runtime, PyTorch, and which inputs may share a batch."""
