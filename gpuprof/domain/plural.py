"""Numbers of things in messages."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """Return ``"1 replica"`` or ``"1,200 replicas"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
