"""Interference between co-located workloads."""
