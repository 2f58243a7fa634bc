"""Readers of measurements that others published; each gives runs that say which file they came from."""
