"""From a deployment map to the processes that serve it."""
