"""YAML as recipes and overrides may hold it: plain values, each in one place."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml


def read_yaml(text: str, name: str, inputs: Mapping[str, Any] | None = None) -> Any:
    """Dictionaries with texts as keys, lists, texts, numbers, booleans and None; nothing is shared.

    Args:
        name: what errors call the file.
        inputs: values in place of those under the file's key `inputs`, also where an alias (*NAME) stands for one.
            Other names are left out.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _require_different_keys(node, set())
        _put_in(node, inputs or {})
        return _unshared(loader.construct_document(node))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from error


def _put_in(node: yaml.Node, inputs: Mapping[str, Any]) -> None:
    top = node.value if isinstance(node, yaml.MappingNode) else []
    given = [value for key, value in top if key.value == "inputs" and isinstance(value, yaml.MappingNode)]
    for key, old in given[0].value if given else ():
        if sum(old is other for _, other in given[0].value) > 1:
            raise ValueError(f"inputs: {key.value} and another one are the same value by an alias: write it out")
        if (name := str(key.value)) in inputs:
            new = yaml.compose(yaml.safe_dump(inputs[name]), yaml.SafeLoader)
            # In its place, since an alias is the same object
            old.__class__, old.__dict__ = type(new), vars(new)


def _require_different_keys(node: yaml.Node, seen: set[yaml.Node]) -> None:
    """Only the last of two equal keys would count. A merge key (<<) brings others, which are overridden."""
    if node in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(node)
    children = node.value
    if isinstance(node, yaml.MappingNode):
        keys = Counter(str(key.value) for key, _ in node.value)
        if twice := sorted(key for key, number in keys.items() if number > 1):
            raise ValueError(f"line {node.start_mark.line + 1}: the key {', '.join(twice)} is given twice")
        children = [part for pair in node.value for part in pair]
    for child in children:
        _require_different_keys(child, seen)


def _unshared(value: Any, key: str = "") -> Any:
    """A copy in which nothing is shared: what a YAML alias stands for is overridden in one place alone."""
    if isinstance(value, dict):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise ValueError(f"{key}the key {odd[0]!r} is no text: put it into quotes")
        return {name: _unshared(item, f"{key}{name}: ") for name, item in value.items()}
    if isinstance(value, list):
        return [_unshared(item, key) for item in value]
    return value
