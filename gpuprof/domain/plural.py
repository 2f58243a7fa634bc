"""Numbers of things in messages."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """Return ``"1 replica"``, ``"1,200 replicas"`` or ``"2 processes"``."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"
