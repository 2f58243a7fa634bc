"""Decides which replicas run where: the problem, the policies that solve it, and an independent check of their maps."""
