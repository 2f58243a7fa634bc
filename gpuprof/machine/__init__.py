"""This machine: its CPU and GPUs, shares of them, MPS, MIG, cgroups, Ray, the doctor."""
