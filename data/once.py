"""A cache for one look at a recipe or at tasks. Data may change between two looks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_CACHE: ContextVar[dict[str, Any] | None] = ContextVar("_CACHE", default=None)


@contextmanager
def opened_once() -> Iterator[None]:
    """Within it, the files of a source, or of a benchmark in many languages, are listed and opened once, however often
    they are asked for."""
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def once(key: str, look: Callable[[], Any]) -> Any:
    """The result of `look`, cached under a key within `opened_once`."""
    cache = _CACHE.get()
    if cache is None:
        return look()
    if key not in cache:
        cache[key] = look()
    return cache[key]
