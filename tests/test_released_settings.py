"""Differences of CLIP-MoE's released code from the paper, against the obvious computation."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_losses import routed
from tiny_clip_moe import IMPLEMENTATIONS, tiny_model
from tiny_runs import DENSE, TUNED, losses, run_stages, weights
from transformers import AutoModel, AutoProcessor

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.engine.recipe import load_recipe
from clip_moe.training.contrastive_task import drop_activations
from clip_moe.training.loader import PairLoader
from clip_moe.training.losses import all_reduce_sum
from clip_moe.training.samplers import Share
from modeling_clip_moe.experts import CLIPMoEExperts

SYMBOLS = {"source": "symbols", "num_samples": 40, "in_memory": True}


def test_the_released_optimizer(tmp_path):
    """AdamW as torch has it, on all parameters, without clipping."""
    settings = {"adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.5, "decay_all": True}
    settings |= {"max_grad_norm": None, "label_smoothing": 0.1, "data": SYMBOLS, "max_steps": 3, "logging_steps": 1}
    output = run_stages(tmp_path, [DENSE, TUNED | settings])
    model, processor = (auto.from_pretrained(output / "dense") for auto in (AutoModel, AutoProcessor))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    data = DataArguments(**SYMBOLS)
    batches = PairLoader(load_pairs(data), processor, data, Share(4)).batches(0)
    for step, expected in enumerate(losses(output / "tuned")):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 3)) / 2
        logits = model(**next(batches)).logits_per_image
        loss = sum(F.cross_entropy(rows, torch.arange(4), label_smoothing=0.1) for rows in (logits, logits.T)) / 2
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained, expected = weights(output / "tuned"), model.state_dict()
    # But biases of keys: softmax does not see them, and AdamW makes steps of what is rounding error
    names = [name for name in trained if not name.endswith("k_proj.bias")]
    assert len(names) == len(expected) - 4
    for name in names:
        torch.testing.assert_close(trained[name], expected[name], atol=1e-5, rtol=0, msg=name)


def test_the_released_router_loss():
    """0.01 * (B_image + B_text / 2) / 8 processes, B = E * sum over choices and experts of share * probability, over
    the tokens of all layers of a tower."""
    generator = torch.Generator().manual_seed(0)
    text, vision = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 5, 10, 4), (2, 5, 7, 4)))
    coefficient = 0.01 * 2 / 8
    config, outputs, batch = routed(tuple(text), tuple(vision), 2, router_aux_loss_coef=coefficient)

    def balance(tower_logits):
        probabilities = tower_logits.flatten(0, -2).softmax(dim=-1)
        choices = F.one_hot(probabilities.topk(2).indices, 4).float()  # (T, K, E)
        return 4 * (choices.mean(dim=0) * probabilities.mean(dim=0)).sum()

    expected = 0.01 * (balance(vision) + balance(text) / 2) / 8
    recipe = load_recipe(Path(__file__).parents[1] / "training" / "recipes" / "clip_moe_released.yaml")
    unified, stage = (next(stage for stage in recipe.stages if stage.name == name) for name in ("unified", "clip_moe"))
    assert unified.changes == {"router_aux_loss_coef": coefficient}
    found, metrics = stage.router_loss(config, outputs, batch, all_reduce_sum)
    torch.testing.assert_close(found, expected)
    assert 1 < metrics["balance_loss"] < 2  # not weighted
    ours, plain = (torch.autograd.grad(loss, (text, vision)) for loss in (found, expected))
    assert min(gradient.abs().max() for gradient in plain) > 1e-8
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_expert_dropout_is_of_the_activations(implementation):
    """One expert, so that its activations are drawn in the order of the tokens."""
    model = tiny_model(num_experts=1, num_experts_per_tok=1)
    drop_activations(model, 0.25)
    model.set_experts_implementation(implementation)
    experts = next(module for module in model.modules() if isinstance(module, CLIPMoEExperts)).train()
    tokens = torch.randn(7, 16, requires_grad=True)

    def plain(tokens):
        hidden = F.dropout(experts.act_fn[0](tokens @ experts.up_proj[0].T + experts.up_proj_bias[0]), 0.25)
        return hidden @ experts.down_proj[0].T + experts.down_proj_bias[0]

    def ours(tokens):
        return experts(tokens, torch.zeros(7, 1, dtype=torch.long), torch.ones(7, 1))

    results = []
    for function in (plain, ours):
        torch.manual_seed(3)
        output = function(tokens)
        results.append([output, *torch.autograd.grad(output.square().sum(), [tokens, experts.up_proj])])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    experts.eval()
    assert torch.equal(ours(tokens), ours(tokens)) and not torch.allclose(ours(tokens), results[0][0])
