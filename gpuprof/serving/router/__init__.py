"""The router: routing, batch formation, admission control, and retries after a worker's death."""
