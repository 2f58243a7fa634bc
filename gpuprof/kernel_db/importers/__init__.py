"""Readers of published measurements; each returns runs that record the file they came from."""
