"""Kernels over time, with the node that launched each kernel, and its use of the device."""
