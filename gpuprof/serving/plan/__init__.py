"""Plans the processes that serve a deployment map."""
