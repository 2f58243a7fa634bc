"""NVIDIA's profilers: starting them and reading their reports."""
