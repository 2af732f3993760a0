"""ReLU routing: the router by a loop over tokens, its loss by hand, and what it does to a run."""

import pytest
import torch
from several_processes import run_processes, train_recipe
from tiny_clip_moe import tiny_block
from tiny_runs import losses, read_log, same_weights, train

from clip_moe.conversion.own_classes import import_models
from lab.methods.relu_router import ReluCLIPModel, ReluRouter, ReluVisionConfig
from lab.methods.relu_routing import load_weighted_l1
from modeling_clip_moe import families
from modeling_clip_moe.own_code import OWN_CLASSES


@pytest.mark.parametrize("padded", [False, True])
def test_the_router_equals_a_loop_over_tokens(padded):
    block = tiny_block(norm_topk_prob=False).train()
    block.router.__class__ = ReluRouter
    mask = torch.rand(6, 7) > 0.3 if padded else torch.ones(6, 7, dtype=torch.bool)
    hidden_states, experts = torch.randn(6, 7, 16, requires_grad=True), block.experts
    expected, numbers = torch.zeros(6, 7, 16), set()
    for b, s in mask.nonzero().tolist():
        scores = block.router.weight @ hidden_states[b, s]
        numbers.add(int((scores > 0).sum()))
        for e in (scores > 0).nonzero().flatten().tolist():
            hidden = experts.act_fn(experts.up_proj[e] @ hidden_states[b, s] + experts.up_proj_bias[e])
            expected[b, s] = expected[b, s] + scores[e] * (experts.down_proj[e] @ hidden + experts.down_proj_bias[e])
    actual = block(hidden_states, mask if padded else None)
    torch.testing.assert_close(actual, expected)
    direction, inputs = torch.randn_like(expected), [hidden_states, *block.parameters()]
    gradients = [torch.autograd.grad((output * direction).sum(), inputs) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)
    assert len(numbers) > 2  # tokens meet different numbers of experts


def test_the_loss_by_hand():
    logits, mask = torch.randn(2, 3, 5, 4), torch.rand(3, 5) > 0.3
    loss, share = load_weighted_l1(tuple(logits), 2, mask)
    by_layer = []
    for layer in logits:
        scores = layer[mask].clamp(min=0)
        by_layer.append(sum((scores[:, e] > 0).float().mean() * scores[:, e].mean() * 4 / 2 for e in range(4)))
    torch.testing.assert_close(loss, sum(by_layer) / 2)
    torch.testing.assert_close(share, (logits[:, mask] > 0).float().mean())


def test_settings_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="ReLU routing goes without norm_topk_prob, eval_capacity_factor"):
        ReluVisionConfig(moe_layers=[1], eval_capacity_factor=1.0)


def relu(recipe):
    changes = {"norm_topk_prob": False, "capacity_factor": None, "router_aux_loss_coef": 0, "router_z_loss_coef": 0}
    recipe["stages"][1]["changes"].update(changes)
    recipe["stages"][2]["stage"] = "lab.methods.relu_routing:ReluStage"


@pytest.fixture(scope="module", autouse=True)
def imported():
    """As with `--import lab.methods.relu_router`; undone at the end."""
    tables = (families.CLASS_OF_TYPE, families.FAMILY_OF_TYPE, families.FAMILY_OF_TEXT, OWN_CLASSES)
    before = [dict(table) for table in tables]
    import_models(ReluCLIPModel.__module__)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_resumed_is_the_same_to_the_bit(whole, tmp_path):
    train(tmp_path, 5, change=relu)
    resumed = train(tmp_path, change=relu)
    assert losses(resumed) == losses(whole(change=relu)) and same_weights(resumed, whole(change=relu))


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"mini_batch_size": 4}], ids=str)
def test_what_saves_memory_changes_nothing(whole, settings):
    """Not the experts a token meets, nor the weight of the loss, which is too small to be seen in the sum."""
    logs = [read_log(whole(change=relu, **more)) for more in (settings, {})]
    for name in [name for name in logs[0][0] if name.endswith(("_per_token", "_weight"))] + ["total_loss"]:
        assert [entry.get(name) for entry in logs[0]] == pytest.approx([entry.get(name) for entry in logs[1]], rel=1e-4)


@pytest.mark.slow
def test_the_weight_follows_the_number_of_experts(tmp_path):
    log = read_log(train(tmp_path, change=relu, max_steps=100, learning_rate=3e-3))
    for tower in ("text", "vision"):
        weights = [entry[f"{tower}_sparsity_weight"] for entry in log]
        assert weights[0] == pytest.approx(1e-8)
        above = [entry[f"{tower}_experts_per_token"] > 2 for entry in log]
        assert set(above) == {True, False}
        for before, after, is_above in zip(weights, weights[1:], above, strict=False):
            assert after == pytest.approx(before * 1.2 if is_above else before / 1.2, rel=1e-5)


def train_with_relu(*arguments):
    """As `accelerate launch -m clip_moe run --import lab.methods.relu_router`."""
    import_models(ReluCLIPModel.__module__)
    train_recipe(*arguments)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(whole, tmp_path):
    train(tmp_path, only=["dense", "sparse"], change=relu)
    run_processes(2, train_with_relu, "--config", tmp_path / "recipe.yaml")
    torch.testing.assert_close(losses(tmp_path / "out" / "tuned"), losses(whole(change=relu)), atol=1e-4, rtol=0)
