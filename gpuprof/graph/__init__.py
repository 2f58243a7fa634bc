"""ONNX files read: nodes, types, shapes, costs of ops, what a runtime executes."""
