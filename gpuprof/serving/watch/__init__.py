"""Observability of a running server: logs, statistics, traces."""
