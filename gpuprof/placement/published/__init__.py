"""The policies that others published."""
