"""Readers of ONNX files: nodes, types, shapes, costs of ops, executed nodes."""
