"""A cache for one look at a recipe. Data may change between two looks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_KEPT: ContextVar[dict[str, Any] | None] = ContextVar("_KEPT", default=None)


@contextmanager
def opened_once() -> Iterator[None]:
    """Within it, the files of a source are listed and opened once, however often they are asked for."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def once(key: str, look: Callable[[], Any]) -> Any:
    """What `look` gives, kept under a key within `opened_once`."""
    kept = _KEPT.get()
    if kept is None:
        return look()
    if key not in kept:
        kept[key] = look()
    return kept[key]
