"""Measurement of each distinct op once, as a single-op model."""
