"""Collecting on a CPU, by ONNX Runtime's own profile."""
