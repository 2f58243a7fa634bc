"""The load generator: a client of any server of the Open Inference Protocol v2, and what its answers say."""
