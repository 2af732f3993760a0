"""Losses of the router, each against an obvious computation."""

import math
from functools import partial

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import modeling_clip_moe
from modeling_clip_moe import load_balancing_loss, router_z_loss


def test_losses_are_means_for_a_trainer():
    """It would divide or multiply a loss that it takes for a sum."""
    models = [value for value in vars(modeling_clip_moe).values() if hasattr(value, "accepts_loss_kwargs")]
    assert len(models) > 12 and not any(model.accepts_loss_kwargs for model in models)


# Probabilities of three tokens over two experts: 0.8 / 0.2, 0.6 / 0.4, 0.5+ / 0.5-
TWO_EXPERTS = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]).log()


FIRST, SECOND = TWO_EXPERTS[:2], torch.tensor([[0.1, 0.9], [0.3, 0.7]]).log()


@pytest.mark.parametrize(
    ("layers", "top_k", "mask", "expected"),
    [
        ((TWO_EXPERTS,), 1, None, 1.0),  # argmax: experts 0, 0, 1, so R = 2 * [2/3, 1/3]; P = [0.5, 0.5]
        ((TWO_EXPERTS,), 1, torch.tensor([1, 1, 0]), 1.4),  # R = 2 * [1, 0], P = [0.7, 0.3]
        ((TWO_EXPERTS,), 2, torch.tensor([1, 1, 0]), 1.0),  # both choices count: R = [1, 1] whatever the router says
        ((FIRST, SECOND), 1, None, (1.4 + 1.6) / 2),  # of the second layer, R = 2 * [0, 1] and P = [0.2, 0.8]
        ((torch.cat([FIRST, SECOND]),), 1, None, 1.0),  # four tokens together: R = 2 * [1/2, 1/2], P = [0.45, 0.55]
    ],
)
def test_load_balancing_loss_by_hand(layers, top_k, mask, expected):
    torch.testing.assert_close(load_balancing_loss(layers, top_k, mask), torch.tensor(expected))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_load_balancing_loss_is_1_at_balance_where_that_of_transformers_is_k(top_k):
    # Each expert is once the first choice, once the second, ...
    logits = torch.stack([torch.arange(4.0).roll(shift) for shift in range(4)])
    torch.testing.assert_close(load_balancing_loss((logits, logits), top_k), torch.tensor(1.0))
    theirs = load_balancing_loss_func((logits, logits), num_experts=4, top_k=top_k)
    torch.testing.assert_close(theirs, torch.tensor(float(top_k)))


def test_router_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [50.0, 50.0]])
    mask = torch.tensor([True, True, False])
    expected = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    torch.testing.assert_close(router_z_loss((logits,), mask), torch.tensor(expected))


@pytest.mark.parametrize(
    "loss",
    [
        partial(load_balancing_loss, top_k=2),
        partial(load_balancing_loss, top_k=1),
        router_z_loss,
    ],
)
def test_losses_of_two_processes_are_those_of_all_tokens(loss):
    logits = torch.randn(2, 6, 5, 4, requires_grad=True)  # (layers, B, S, E)
    mask = torch.rand(6, 5) > 0.3
    whole = loss(tuple(logits), mask=mask)
    whole.backward()

    # Each "process" sees two or four sequences; `reduce` adds what the other one has
    split, parts, sums = logits.detach().clone().requires_grad_(), (slice(0, 2), slice(2, 6)), []
    for rows in parts:
        loss(tuple(split[:, rows]), mask=mask[rows], reduce=lambda vector: sums.append(vector) or vector)
    for rows, others in zip(parts, reversed(sums), strict=True):
        value = loss(tuple(split[:, rows]), mask=mask[rows], reduce=lambda vector, others=others: vector + others)
        torch.testing.assert_close(value, whole)
    value.backward()
    torch.testing.assert_close(split.grad, logits.grad)
