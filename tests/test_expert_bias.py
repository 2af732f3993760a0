"""Balance without a loss: what the biases of experts count, and how they move."""

import pytest
import torch
from accelerate import Accelerator
from several_processes import run_processes, train_recipe
from test_invariants import set_towers
from tiny_clip_moe import inputs, tiny_model
from tiny_runs import read_log, train, weights

from clip_moe.conversion.average import average
from clip_moe.training.contrastive_task import ExpertBiases
from modeling_clip_moe import CLIPMoEModel, load_balancing_loss
from modeling_clip_moe.sparse_moe import CLIPMoERouter

BIASED = {"change": set_towers(use_expert_bias=True)}


def test_biases_move_towards_balance_by_one_rate():
    """Padding counts for no expert, and neither does evaluation; what capacity drops does."""
    model = tiny_model(use_expert_bias=True, capacity_factor=0.5).train()
    router = model.text_model.encoder.layers[1].mlp.router
    router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.5, 0.0]))
    biases, batch, chosen = ExpertBiases(model), inputs(), []
    for _ in range(2):  # micro-steps
        logits = model(**batch, output_router_logits=True).text_model_output.router_logits[0]
        ids = (logits.softmax(-1) + router.expert_bias).topk(2).indices
        chosen.append(ids[batch["attention_mask"].bool()].flatten())
    model.eval()(**batch)
    counts = torch.cat(chosen).bincount(minlength=4)
    assert counts.sum() == 2 * 2 * batch["attention_mask"].sum()
    biases.move(Accelerator(cpu=True))
    by_hand = torch.tensor([0.0, 0.0, 0.5, 0.0]) + 1e-3 * (counts.float().mean() - counts).sign()
    torch.testing.assert_close(router.expert_bias, by_hand)
    before = router.expert_bias.clone()
    biases.move(Accelerator(cpu=True))  # counts begin anew
    assert torch.equal(router.expert_bias, before)


def test_biases_of_routers_that_do_not_train_stay():
    model = tiny_model(use_expert_bias=True)
    model.vision_model.requires_grad_(False)
    assert len(ExpertBiases(model).routers) == 2
    assert not ExpertBiases(tiny_model()).routers


@pytest.mark.slow
def test_biases_balance(tmp_path, monkeypatch):
    """Without a loss for that, 40 steps of the same batches."""
    violations = []
    for rate in (1e-9, 2e-3):
        monkeypatch.setattr(ExpertBiases, "RATE", rate)
        log = read_log(train(tmp_path / str(rate), change=unbalanced, max_steps=40, learning_rate=1e-5))
        violations.append([entry["max_violation"] for entry in log if "max_violation" in entry])
    assert violations[0][0] == violations[1][0]
    assert sum(violations[1][-5:]) < 0.7 * sum(violations[0][-5:])


def unbalanced(recipe):
    set_towers(use_expert_bias=True)(recipe)
    recipe["stages"][1]["changes"]["router_aux_loss_coef"] = 0


def test_biases_are_saved_in_full_precision(tmp_path):
    """And stay what they are in a model of bfloat16."""
    folder = train(tmp_path, **BIASED, max_steps=5)
    saved = {name: value for name, value in weights(folder).items() if name.endswith("expert_bias")}
    assert saved and all(value.dtype == torch.float32 and value.any() for value in saved.values())
    loaded = CLIPMoEModel.from_pretrained(folder, dtype=torch.bfloat16)
    for name, value in saved.items():
        found = loaded.get_buffer(name)
        assert found.dtype == torch.float32 and torch.equal(found, value)


@pytest.mark.slow
def test_two_processes_move_their_biases_as_one(whole, tmp_path):
    train(tmp_path, only=["dense", "sparse"], **BIASED)
    run_processes(2, train_recipe, "--config", tmp_path / "recipe.yaml")
    biases = {name: value for name, value in weights(tmp_path / "out" / "tuned").items() if "expert_bias" in name}
    assert len(biases) == 2
    for name, value in biases.items():
        torch.testing.assert_close(value, weights(whole(**BIASED))[name])


def test_the_balance_loss_of_sigmoid_scores_by_hand():
    logits = torch.randn(5, 4, dtype=torch.float64)
    scores = 1 / (1 + (-logits).exp())
    scores = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros(4, dtype=torch.float64)
    for token in logits:
        chosen[token.topk(2).indices] += 1 / 5
    by_hand = 4 / 2 * (chosen * scores.mean(0)).sum()
    loss = load_balancing_loss((logits,), 2, scoring_func="sigmoid")
    torch.testing.assert_close(loss, by_hand.float())


def test_biases_are_averaged_and_keep_their_precision(tmp_path):
    model, folders = tiny_model(use_expert_bias=True), []
    for number in range(2):
        for router in (module for module in model.modules() if isinstance(module, CLIPMoERouter)):
            router.expert_bias.fill_(0.001 + number)
        folders.append(tmp_path / str(number))
        model.save_pretrained(folders[-1])
    for router in (module for module in average(folders, [0.25, 0.75]).modules() if isinstance(module, CLIPMoERouter)):
        torch.testing.assert_close(router.expert_bias, torch.full((4,), 0.751))
    router = model.to(torch.bfloat16).text_model.encoder.layers[1].mlp.router
    assert router.weight.dtype == torch.bfloat16 and torch.equal(router.expert_bias, torch.full((4,), 1.001))
