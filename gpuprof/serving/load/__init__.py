"""The load generator: sends traffic to a server, and compares the results with predictions."""
