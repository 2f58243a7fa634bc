"""The serving runtime: a router, one worker process for each replica process, and the Open Inference Protocol."""
