"""Decides which replicas run where: the problem, the policies that solve it, and the check that none of them wrote."""
