"""Names in error messages."""

import difflib
from collections.abc import Iterable

NAMES_PER_ERROR = 8


def cut(names: Iterable[str]) -> str:
    """Joins names for an error message, the first few in full."""
    names = list(names)
    more = f" and {len(names) - NAMES_PER_ERROR} more" if len(names) > NAMES_PER_ERROR else ""
    return ", ".join(names[:NAMES_PER_ERROR]) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What follows an unknown name in an error message: the most similar known one, or nothing where none is."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""
