"""conversion/rules.py: every way in which weights can fail to fit. The converters try every kind of rule."""

import logging
import re

import pytest
import torch

from clip_moe.conversion.rules import Rule, apply_rules, renaming

IDENTITY = [Rule("(.*)", r"\1")]


def tensors(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def test_what_is_dropped_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        assert apply_rules({"mask": torch.ones(1)}, {}, [Rule("mask", (), reason="a constant")]) == {}
    assert "dropped mask: a constant" in caplog.text


TWICE = "converted by two rules or from two tensors: "
SPLIT = Rule("qkv", ("q", "k", "v"), lambda w: w.chunk(3))


@pytest.mark.parametrize(
    ("source", "shapes", "rules", "message"),
    [
        (tensors(a=2, b=2), {"a": (2,)}, [Rule("a", "a")], "left over in the source: b"),
        (tensors(ab=2), {}, [Rule("a", "a")], "left over in the source: ab"),  # a rule speaks of a whole key
        (tensors(**{"layers.2": 1}), {}, [Rule(r"layers\.(\d)", r"blocks.\1")], "left over in the source: layers.2"),
        (tensors(a=2), {"a": (2,), "c": (2,), "d": (3,)}, IDENTITY, "missing from the source: c, d"),
        (tensors(a=2), {"a": (2,)}, [*IDENTITY, Rule("a", "a")], TWICE + "a"),
        (tensors(a=2, b=2), {"c": (2,)}, [Rule("[ab]", "c")], TWICE + "a, b"),
        (tensors(a=2, b=2), {"c": (2,)}, [Rule("a", "c"), Rule("b", "c")], TWICE + "b"),
        (tensors(a=2), {"a": (3,)}, IDENTITY, "of the wrong shape: a is (2,) and must be (3,)"),
        (tensors(qkv=2), {"q": (1,), "k": (1,), "v": (1,)}, [SPLIT], "qkv (2,) to q, k, v"),
        (tensors(**{"experts.0": 2, "experts.2": 2}), {"experts": (3, 2)},
         [Rule(r"experts\.\d", "experts", torch.stack, merges=True)],
         "experts is (2, 2) and must be (3, 2)"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(source, shapes, rules, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_rules(source, tensors(**shapes), rules)


def test_names_with_placeholders_lead_there_and_back():
    source = {"a.3.weight": torch.ones(1), "a.12.bias": torch.zeros(1)}
    there = apply_rules(source, None, [renaming("a.{layer}.{kind}", "b.layers.{layer}.{kind}")])
    assert there.keys() == {"b.layers.3.weight", "b.layers.12.bias"}
    assert apply_rules(there, None, [renaming("b.layers.{layer}.{kind}", "a.{layer}.{kind}")]) == source


def test_all_problems_are_reported_at_once_and_long_lists_cut():
    source = {f"old.{index}": torch.ones(1) for index in range(20)} | {"a": torch.ones(2)}
    with pytest.raises(ValueError) as error:
        apply_rules(source, tensors(a=3, new=1), [Rule("a", "a")])
    message = str(error.value)
    assert "old.0, old.1" in message and "and 12 more" in message and "old.8" not in message
    assert "missing from the source: new" in message and "a is (2,) and must be (3,)" in message
