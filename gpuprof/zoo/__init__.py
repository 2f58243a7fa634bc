"""Standard architectures as ONNX files with random weights, built without downloads."""
