"""Kernels over time: which node launched each, and how it used the device."""
