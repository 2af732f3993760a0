"""The router and its capacity, each against an obvious computation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_clip_moe import SWIGLU, plain_block, tiny_block

from modeling_clip_moe.dispatch import as_fraction, dispatch_within_capacity


def kept_choices(ids, num_experts, factor, mask=None, num_groups=1):
    """(B, S, K) of bool, which choices find room at their expert."""
    ids = ids if mask is None else ids.masked_fill(~mask.bool()[..., None], num_experts)
    return dispatch_within_capacity(ids.flatten(0, 1), num_experts, as_fraction(factor), num_groups)[1].view_as(ids)


def test_jitter_is_for_the_router_in_training_alone():
    block = tiny_block(router_jitter_noise=0.5)
    hidden_states = torch.randn(2, 5, 16)
    before = hidden_states.clone()
    clean = block.eval().router(hidden_states)[0]
    torch.testing.assert_close(block.router(hidden_states)[0], clean)
    noisy = block.train().router(hidden_states)[0]
    assert (noisy - clean).abs().max() > 0.1
    torch.testing.assert_close(hidden_states, before, rtol=0, atol=0)
    torch.manual_seed(3)
    first = block.router(hidden_states)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(block.router(hidden_states)[0], first, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_computes_in_float32(dtype):
    block = tiny_block()
    hidden_states = torch.randn(2, 5, 16).to(dtype)
    expected = F.linear(hidden_states.float(), block.router.weight.to(dtype).float())
    torch.testing.assert_close(block.to(dtype).router(hidden_states)[0], expected)
    block.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, weights, *_ = block.router(hidden_states)
    assert logits.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(hidden_states.float(), block.router.weight))


@pytest.mark.parametrize(
    ("tokens", "factor", "num_experts", "capacity"),
    [(25, 1.2, 2, 15), (10, 1.1, 1, 10), (7, 1, 2, 4), (25_000, 4 / 3, 8, 4167)],
)
def test_capacity_is_not_rounded_up_by_rounding(tokens, factor, num_experts, capacity):
    """25 x 1.2 / 2 is 15, and a little more in float32; 10 x 1.1 a little more than 11 in float64."""
    ids = torch.zeros(1, tokens, 1, dtype=torch.long)
    assert kept_choices(ids, num_experts, factor).sum() == capacity


def plain_mask(ids, num_experts, factor, mask, num_groups):
    """By counting in a one-hot of all choices of a group, its first choices first."""
    choices = F.one_hot(ids, num_experts) * mask.long()[..., None, None]  # (B, S, K, E)
    choices = choices.view(num_groups, -1, *choices.shape[2:]).transpose(1, 2)  # (groups, K, tokens, E)
    position = choices.flatten(1, 2).cumsum(dim=1).view_as(choices)
    capacity = (mask.view(num_groups, -1).sum(dim=-1) * factor / num_experts).ceil()
    kept = (choices * (position <= capacity[:, None, None, None])).sum(dim=-1)
    return kept.transpose(1, 2).reshape(ids.shape).bool()


def test_a_sort_keeps_what_counting_keeps():
    rng = np.random.default_rng(0)
    for case in range(300):
        torch.manual_seed(case)
        num_groups, in_group, length, num_experts = rng.integers(1, [4, 5, 12, 9]).tolist()
        top_k, factor = int(rng.integers(1, num_experts + 1)), rng.integers(1, 17) / 8
        logits = torch.randint(0, 3, (num_groups * in_group, length, num_experts)).float()  # many are equal
        mask = torch.rand(logits.shape[:2]) < rng.choice([0.3, 0.8, 1.0])
        arguments = logits.topk(top_k).indices, num_experts, factor, mask, num_groups
        assert torch.equal(kept_choices(*arguments), plain_mask(*arguments)), case


def test_a_mask_may_be_a_slice():
    mask = torch.ones(2, 4).long()[:, :3]
    assert kept_choices(torch.zeros(2, 3, 1, dtype=torch.long), 2, 1.0, mask).sum() == 3


SCORES = {
    "softmax": {},
    "sigmoid": {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    "biased": {"use_expert_bias": True},
    "sigmoid, biased": {"scoring_func": "sigmoid", "use_expert_bias": True},
    "narrow, shared": {"moe_intermediate_size": 8, "num_shared_experts": 2},
    "gate of fusion": {"fusion_gate": True},
    "gated": {"use_gated_mlp": True, "fusion_gate": True},
    "without biases": {"moe_mlp_bias": False},
    "MoE-ViE": {**SWIGLU, "num_shared_experts": 1, "scoring_func": "sigmoid", "use_expert_bias": True},
}


# Whether weights are normalized, and whether before capacity; a capacity factor, and the size of its groups
NORMS, CAPACITIES = [(False, False), (True, False), (True, True)], [(None, 6), (0.75, 6), (1.25, 2)]
# All pairs, and all triples of capacity, norm and padding
CASES = [
    pytest.param(scores, *capacity, *NORMS[(i + j) % 3], (i // 3 + j) % 2, id=f"{name}-{capacity[0]}")
    for i, (name, scores) in enumerate(SCORES.items())
    for j, capacity in enumerate(CAPACITIES)
]


@pytest.mark.parametrize(
    ("scores", "capacity_factor", "group_size", "norm_topk_prob", "norm_before_capacity", "padded"), CASES
)
def test_block_equals_a_loop_over_tokens(
    scores, capacity_factor, group_size, norm_topk_prob, norm_before_capacity, padded
):
    norm = {"norm_topk_prob": norm_topk_prob, "norm_before_capacity": norm_before_capacity}
    block = tiny_block(capacity_factor=capacity_factor, capacity_group_size=group_size, **norm, **scores).train()
    if block.router.expert_bias is not None:
        block.router.expert_bias.copy_(torch.tensor([0.2, -0.2, 0.1, 0.0]))
    mask = torch.rand(6, 7) > 0.3 if padded else torch.ones(6, 7, dtype=torch.bool)
    hidden_states = torch.randn(6, 7, 16, requires_grad=True)
    expected, num_dropped = plain_block(block, hidden_states, mask, capacity_factor, group_size)
    actual = block(hidden_states, None if mask.all() else mask)
    actual = actual * mask[..., None]  # shared experts and the base compute padding, too
    torch.testing.assert_close(actual, expected)
    direction, inputs = torch.randn_like(expected), [hidden_states, *block.parameters()]
    gradients = [torch.autograd.grad((output * direction).sum(), inputs) for output in (actual, expected)]
    assert max(gradient.abs().max() for gradient in gradients[1]) > 1e-4
    torch.testing.assert_close(*gradients)

    _, weights, ids, _ = block.router(hidden_states, mask)
    assert ((ids == 4) & mask[..., None]).sum() == num_dropped  # how dropped choices count
    assert (num_dropped > 0) == (capacity_factor is not None) and (weights[ids == 4] == 0).all()


def test_capacity_is_for_training_and_its_evaluation_factor_for_evaluation():
    hidden_states = torch.randn(4, 7, 16)
    for factor, training in (("capacity_factor", True), ("eval_capacity_factor", False)):
        block = tiny_block(**{factor: 0.5})
        assert (block.train(training).router(hidden_states)[2] == 4).any()
        assert not (block.train(not training).router(hidden_states)[2] == 4).any()
    block = tiny_block(capacity_factor=1, capacity_group_size=3)
    with pytest.raises(ValueError, match="capacity_group_size=3 does not divide the batch of 4"):
        block.train()(hidden_states)
    block.eval()(hidden_states)  # no capacity, no groups
