"""Policies from the literature."""
