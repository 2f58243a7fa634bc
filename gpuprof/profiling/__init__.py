"""Measurement: collectors that run a model in a child process and return rows for the kernel database."""
