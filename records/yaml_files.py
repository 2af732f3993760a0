"""YAML as recipes and overrides may hold it: plain values of a bounded size, whatever stands in the file."""

import math
from collections import Counter
from typing import Any

import yaml

# Far above any recipe: an alias stands for all that it names, so that a few lines can ask for more than fits anywhere.
MOST_VALUES, MOST_LEVELS, MOST_CHARACTERS = 100_000, 20, 1_000_000


def read_yaml(text: str, name: str) -> Any:
    """Dictionaries with texts as keys, lists, texts, finite numbers of 64 bits, booleans and None; nothing is shared.

    Args:
        name: of what is read, for errors.

    Raises:
        ValueError: it is no YAML, holds anything else, gives a key twice, or is too large, too deep or endless.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{name} has {len(text)} characters, more than the {MOST_CHARACTERS} of any recipe")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _require_bounded(node, {})
        return _plain(loader.construct_document(node))
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"{name} is nested in more than {MOST_LEVELS} levels") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _require_bounded(node: yaml.Node, sizes: dict[yaml.Node, int], level: int = 0) -> int:
    """The number of values of a node when its aliases are written out."""
    if level > MOST_LEVELS:
        raise RecursionError
    line = node.start_mark.line + 1
    if node in sizes and sizes[node] is None:
        raise ValueError(f"line {line}: an alias stands for a value that holds it")
    if node not in sizes:
        sizes[node] = None
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            _require_different_keys(node)
            children = [part for pair in children for part in pair]
        sizes[node] = 1 + sum(_require_bounded(child, sizes, level + 1) for child in children)
    if sizes[node] > MOST_VALUES:
        raise ValueError(f"line {line}: more than {MOST_VALUES} values, with what aliases stand for")
    return sizes[node]


def _require_different_keys(node: yaml.MappingNode) -> None:
    """Of a key that is given twice, the last one would count. What a merge key (<<) brings along is overridden."""
    keys = Counter(str(key.value) for key, _ in node.value)
    twice = sorted(key for key, number in keys.items() if number > 1)
    if twice:
        raise ValueError(f"line {node.start_mark.line + 1}: the key {', '.join(twice)} is given twice")


def _plain(value: Any, key: str = "") -> Any:
    """A copy in which nothing is shared: what a YAML alias stands for is overridden in one place alone."""
    if isinstance(value, dict):
        odd = [name for name in value if not isinstance(name, str)]
        if odd:
            raise ValueError(f"{key}the key {odd[0]!r:.60} is no text: put it into quotes")
        return {_plain(name, key): _plain(item, f"{key}{name}: ") for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, key) for item in value]
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
        raise ValueError(f"{key}{value!r:.60} has characters that no file can have in its name or as text")
    if isinstance(value, float) and not math.isfinite(value) or isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{key}the number {str(value):.60} is not finite or has more than 64 bits")
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"{key}{value!r:.60} is a {type(value).__name__}, which no setting is: put a text into quotes")
    return value


class _Loader(yaml.SafeLoader):
    """YAML without tags, which recipes do not need."""

    def fetch_tag(self):
        raise ValueError(f"line {self.line + 1}: a recipe has no tags: put a text with ! into quotes")
