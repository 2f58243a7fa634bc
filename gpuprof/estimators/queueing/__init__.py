"""Queueing models: from the service time of a batch to the sojourn time of a request."""
