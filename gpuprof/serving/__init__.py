"""The serving runtime: router, worker processes, and the Open Inference Protocol."""
