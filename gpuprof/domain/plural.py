"""Counts with their noun, for messages."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1.

    Examples
    --------
    >>> count_of(1, "replica"), count_of(1200, "replica"), count_of(2, "process")
    ('1 replica', '1,200 replicas', '2 processes')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"
