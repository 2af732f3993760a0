"""conversion/rules.py: every kind of rule, and every way in which weights can fail to fit."""

import logging
import re

import pytest
import torch

from conversion.rules import Rule, apply_rules, renaming

IDENTITY = [Rule("(.*)", r"\1")]


def tensors(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def shapes(state):
    return {key: tensor.shape for key, tensor in state.items()}


def fails(message, source, target_shapes, rules):
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_rules(source, target_shapes, rules)


def test_rename_transpose_and_split():
    source = {"a.weight": torch.randn(2, 3), "proj": torch.randn(2, 5), "qkv": torch.randn(6, 2)}
    rules = [
        Rule(r"a\.(weight|bias)", r"b.\1"),
        Rule("proj", "proj.weight", lambda w: w.T),
        Rule("qkv", ("q", "k", "v"), lambda w: w.chunk(3)),
    ]
    target_shapes = {"b.weight": (2, 3), "proj.weight": (5, 2), "q": (2, 2), "k": (2, 2), "v": (2, 2)}
    state = apply_rules(source, target_shapes, rules)
    assert state.keys() == target_shapes.keys()
    assert torch.equal(state["b.weight"], source["a.weight"])
    assert torch.equal(state["proj.weight"], source["proj"].T)
    assert torch.equal(torch.cat([state["q"], state["k"], state["v"]]), source["qkv"])


def test_experts_stack_in_numerical_order_and_unstack_again():
    separate = {f"experts.{index}.weight": torch.full((2, 3), float(index)) for index in (10, *range(10))}
    stack = [Rule(r"experts\.\d+\.(weight)", r"experts.\1", lambda *w: torch.stack(w), merges=True)]
    stacked = apply_rules(separate, {"experts.weight": (11, 2, 3)}, stack)
    assert stacked["experts.weight"][:, 0, 0].tolist() == list(range(11))

    names = tuple(rf"experts.{index}.\1" for index in range(11))
    back = apply_rules(stacked, shapes(separate), [Rule(r"experts\.(weight)", names, lambda w: w.unbind())])
    assert all(torch.equal(back[key], tensor) for key, tensor in separate.items())


def test_tile_and_take_one_expert():
    source = {"mlp": torch.randn(2, 3)}
    tile = [Rule("mlp", ("experts", "base"), lambda w: (w.expand(4, *w.shape), w))]
    tiled = apply_rules(source, {"experts": (4, 2, 3), "base": (2, 3)}, tile)
    take = [Rule("experts", "mlp", lambda w: w[2]), Rule("base", (), reason="not wanted")]
    assert torch.equal(apply_rules(tiled, {"mlp": (2, 3)}, take)["mlp"], source["mlp"])


def test_two_differently_named_tensors_merge():
    source = {"positions_res": torch.ones(5, 2), "positions": torch.zeros(5, 2)}

    def join(*tables):
        first, rest = tables
        return torch.cat([first[:2], rest[2:]])

    rules = [Rule("positions(_res)?", "positions.weight", join, merges=True)]
    joined = apply_rules(source, {"positions.weight": (5, 2)}, rules)["positions.weight"]
    assert joined[:, 0].tolist() == [0, 0, 1, 1, 1]
    fails("of the wrong shape: positions (5, 2)", {"positions": torch.ones(5, 2)}, {"positions.weight": (5, 2)}, rules)


def test_keeps_each_tensors_dtype():
    source = {"half": torch.ones(2, dtype=torch.float16), "number": torch.ones(2, dtype=torch.int64)}
    state = apply_rules(source, shapes(source), IDENTITY)
    assert {key: tensor.dtype for key, tensor in state.items()} == {"half": torch.float16, "number": torch.int64}


def test_what_is_dropped_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        assert apply_rules({"mask": torch.ones(1)}, {}, [Rule("mask", (), reason="a constant")]) == {}
    assert "dropped mask: a constant" in caplog.text


TWICE = "converted by two rules or from two tensors: "
SPLIT = Rule("qkv", ("q", "k", "v"), lambda w: w.chunk(3))


@pytest.mark.parametrize(
    ("source", "target_shapes", "rules", "message"),
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
         [Rule(r"experts\.\d", "experts", lambda *w: torch.stack(w), merges=True)],
         "experts is (2, 2) and must be (3, 2)"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(source, target_shapes, rules, message):
    fails(message, source, target_shapes, rules)


def test_names_with_placeholders_lead_there_and_back():
    source = {"a.3.weight": torch.ones(1), "a.12.bias": torch.zeros(1)}
    there = apply_rules(source, None, [renaming("a.{layer}.{kind}", "b.layers.{layer}.{kind}")])
    assert there.keys() == {"b.layers.3.weight", "b.layers.12.bias"}
    assert apply_rules(there, None, [renaming("b.layers.{layer}.{kind}", "a.{layer}.{kind}")]) == source


def test_all_problems_are_reported_at_once_and_long_lists_cut():
    source = {f"old.{index}": torch.ones(1) for index in range(20)} | {"a": torch.ones(2)}
    with pytest.raises(ValueError) as error:
        apply_rules(source, {"a": (3,), "new": (1,)}, [Rule("a", "a")])
    message = str(error.value)
    assert "old.0, old.1" in message and "and 12 more" in message and "old.8" not in message
    assert "missing from the source: new" in message and "a is (2,) and must be (3,)" in message
