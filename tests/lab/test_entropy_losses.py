"""LIMoE's entropy losses: by hand, and of a batch in parts."""

import math
from types import SimpleNamespace

import pytest
import torch
from steps import assert_same_step, gradient_of
from tiny_clip_moe import inputs, tiny_model

from clip_moe.training.losses import all_reduce_sum
from lab.methods.entropy_losses import EntropyLosses, EntropyStage, global_entropy_loss, local_entropy_loss

SETTINGS = {"local_coef": {"text": 0.3}, "global_coef": {"text": 0.5, "vision": 0.5}, "min_experts": 3.9}
STAGE = {"name": "limoe", "stage": "lab.methods.entropy_losses:EntropyStage", "model": "x", "max_steps": 1}
STAGE |= {"data": {"source": "symbols", "num_samples": 1}, "global_batch_size": 12, "learning_rate": 1e-3}


def test_entropy_losses_by_hand():
    probabilities = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    logits, mask = (probabilities.log(),), torch.tensor([1, 1, 0])
    torch.testing.assert_close(local_entropy_loss(logits, mask), torch.tensor(math.log(2) / 2))
    # Mean of the first two: 1/4, 1/4, 0, 1/2, of entropy 1.5 log 2
    torch.testing.assert_close(global_entropy_loss(logits, 4, mask), torch.tensor(0.5 * math.log(2)))
    assert global_entropy_loss(logits, 2, mask) == 0


def test_entropy_losses_of_a_router_that_is_sure_have_a_gradient():
    logits = torch.tensor([[300.0, 0.0, 0.0, 0.0], [300.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = local_entropy_loss((logits,)) + global_entropy_loss((logits,), 2)
    torch.testing.assert_close(loss, torch.tensor(math.log(2)))
    loss.backward()
    assert logits.grad.isfinite().all()


def test_each_tower_has_its_weights_and_both_sides_of_the_threshold():
    """Texts spread over two of four experts, images over one: 1 bit and 0 of entropy in the mean."""
    text = torch.tensor([[[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]]).log()
    vision = torch.tensor([[[0, 0, 1.0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0]]]).log()
    outputs = SimpleNamespace(text_router_logits=(text,), vision_router_logits=(vision,))
    batch = {"attention_mask": torch.ones(1, 2)}
    loss, metrics = EntropyLosses({"text": 0.5}, {"text": 3.0, "vision": 2.0}, 2)(
        None, outputs, batch, progress=0.0, reduce=all_reduce_sum
    )
    # 0.5 * local of texts, + 3 * max(0, log 2 - log 2) + 2 * max(0, log 2 - 0)
    torch.testing.assert_close(loss, torch.tensor(0.5 * math.log(2) + 0 + 2 * math.log(2)))
    expected = {"local_entropy_text": 1, "global_entropy_text": 0, "global_entropy_vision": 1}  # bits
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)


def computed(**settings):
    torch.manual_seed(1)
    return gradient_of(tiny_model().train(), EntropyStage(**STAGE, **SETTINGS, **settings), inputs(12))


def test_parts_have_the_gradient_of_the_whole():
    assert_same_step(computed(mini_batch_size=2), computed())


def test_towers_without_such_routers_are_refused():
    for fields, message in (({"scoring_func": "sigmoid"}, "no routers with"), ({"num_experts": 2}, "3.9 of 2 experts")):
        with pytest.raises(ValueError, match=message):
            EntropyStage(**STAGE, **SETTINGS).auxiliary_losses(tiny_model(**fields), SimpleNamespace())
