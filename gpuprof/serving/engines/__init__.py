"""Engines that start and restart the machine processes: locally, or through Ray."""
