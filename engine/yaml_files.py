"""YAML as recipes and overrides may hold it: plain values, each in one place."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

# Numbers that YAML 1.1 reads differently: octal and base 60
ODD_NUMBER = re.compile(r"[+-]?0\d+|[+-]?\d+(:\d+)+(\.\d*)?")


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
        _put_in(node, inputs or {})
        return _value(loader, node, set())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from error


def _put_in(node: yaml.Node, inputs: Mapping[str, Any]) -> None:
    top = node.value if isinstance(node, yaml.MappingNode) else []
    given = [value for key, value in top if key.value == "inputs" and isinstance(value, yaml.MappingNode)]
    for key, old in given[0].value if given else ():
        if sum(old is other for _, other in given[0].value) > 1:
            raise ValueError(f"inputs: {key.value} is an alias of another input: write its value out")
        if (name := str(key.value)) in inputs:
            new = yaml.compose(yaml.safe_dump(inputs[name]), yaml.SafeLoader)
            # In its place, since an alias is the same object
            old.__class__, old.__dict__ = type(new), vars(new)


def _value(loader: yaml.SafeLoader, node: yaml.Node, merged: set[yaml.Node]) -> Any:
    """The value of a node, made anew for each alias, so that what it stands for is overridden in one place alone.

    Args:
        merged: nodes that have the values of their merge keys (<<).
    """
    if node.tag == loader.DEFAULT_SEQUENCE_TAG and isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, merged) for item in node.value]
    if node.tag.endswith((":int", ":float")) and ODD_NUMBER.fullmatch(node.value):
        raise ValueError(f"YAML reads {node.value} as a different number: write it in decimal, or quote it as text")
    if node.tag != loader.DEFAULT_MAPPING_TAG or not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    if node not in merged:
        keys = Counter(str(key.value) for key, _ in node.value)
        if twice := sorted(key for key, number in keys.items() if number > 1):
            raise ValueError(f"line {node.start_mark.line + 1}: duplicate key {', '.join(twice)}")
        loader.flatten_mapping(node)
        merged.add(node)
    values = {}
    for key_node, item in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ValueError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not text: quote it")
        values[key] = _value(loader, item, merged)
    return values
