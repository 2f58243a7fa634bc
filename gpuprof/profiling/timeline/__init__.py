"""Kernels over time: whose node each was, and what the device did with it."""
