"""Collecting on a GPU, and from recordings made elsewhere."""
