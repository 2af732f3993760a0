"""Names and values in error messages."""

import difflib
import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

NAMES_PER_ERROR = 8


class Faults(ValueError):
    """A multi-line error: the number of faults, then one line each."""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once per process."""
    logger.warning(message)


def one_line(text: object) -> str:
    """Untrusted text on one line. Characters that cannot be seen, or control a terminal, are escaped."""
    letters = " ".join(str(text).split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in letters)


def join_names(names: Iterable[str]) -> str:
    """Joins names for an error message, the first few in full."""
    names = list(names)
    more = f" and {len(names) - NAMES_PER_ERROR} more" if len(names) > NAMES_PER_ERROR else ""
    return ", ".join(names[:NAMES_PER_ERROR]) + more


def shortened(value: Any) -> str:
    """A value for an error message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def in_one_line(faults: Iterable[Mapping[str, Any]]) -> str:
    """The faults of settings, as pydantic lists them, in one line."""
    return "; ".join(f"{'.'.join(map(str, fault['loc']))} {fault_text(fault)}".strip() for fault in faults)


def fault_text(fault: Mapping[str, Any]) -> str:
    """A fault as pydantic lists it, with the value, which our own checks name themselves."""
    value = "" if fault["type"] in ("value_error", "missing") else f" (got {shortened(fault['input'])})"
    return fault["msg"].removeprefix("Value error, ") + value


def most_similar(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to an unknown one; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint after an unknown name in an error: the most similar known one, or nothing if none is similar."""
    similar = most_similar(name, known)
    return f" (did you mean {similar!r}?)" if similar else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known one, or else all known ones."""
    known = sorted(known)
    return did_you_mean(name, known).strip(" ()") or f"known are {', '.join(known) or 'none'}"
