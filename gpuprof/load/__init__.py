"""The load generator, a client of any Open Inference Protocol v2 server, and the evaluation of its measurements."""
