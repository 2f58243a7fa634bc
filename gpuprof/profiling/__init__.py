"""Measuring: collectors that run a model in a child process and give rows for the kernel database."""
