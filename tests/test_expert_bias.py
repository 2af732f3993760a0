"""Balance without a loss: what the biases of experts count, and how they move."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from tiny_clip_moe import inputs, tiny_model
from tiny_runs import set_towers, train, weights

from clip_moe.training.contrastive_task import ExpertBiases
from modeling_clip_moe import CLIPMoEModel, load_balancing_loss

BIASED = {"change": set_towers(use_expert_bias=True)}
each_update = pytest.mark.parametrize("update", ["sign", "z_score"])


def moves_by_hand(counts, update):
    """How far each bias moves for the tokens that the experts of a layer got."""
    mean = sum(counts) / len(counts)
    if update == "sign":
        return torch.tensor([1e-3 * math.copysign(count != mean, mean - count) for count in counts])
    deviation = math.sqrt(sum((count - mean) ** 2 for count in counts) / len(counts))
    return torch.tensor([1e-3 * (mean - count) / deviation for count in counts])


@each_update
def test_biases_move_towards_balance_by_one_rate(update):
    """Padding counts for no expert, and neither does evaluation; what capacity drops does."""
    model = tiny_model(use_expert_bias=True, capacity_factor=0.5).train()
    router = model.text_model.encoder.layers[1].mlp.router
    router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.5, 0.0]))
    biases, batch, chosen = ExpertBiases(model, update), inputs(), []
    for _ in range(2):  # micro-steps
        logits = model(**batch, output_router_logits=True).text_model_output.router_logits[0]
        ids = (logits.softmax(-1) + router.expert_bias).topk(2).indices
        chosen.append(ids[batch["attention_mask"].bool()].flatten())
    model.eval()(**batch)
    counts = torch.cat(chosen).bincount(minlength=4)
    assert counts.sum() == 2 * 2 * batch["attention_mask"].sum()
    biases.move(Accelerator(cpu=True))
    by_hand = torch.tensor([0.0, 0.0, 0.5, 0.0]) + moves_by_hand(counts.tolist(), update)
    torch.testing.assert_close(router.expert_bias, by_hand, atol=1e-7, rtol=0)
    before = router.expert_bias.clone()
    for balanced in (0, 7):  # counts begin anew
        biases.counts[0] += balanced
        biases.move(Accelerator(cpu=True))
        assert torch.equal(router.expert_bias, before)


@each_update
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_tokens_that_count_twice_move_biases_alike(update):
    model, batch, counts, moved = tiny_model(use_expert_bias=True).train(), inputs(), [], []
    for checkpointing in (False, True):
        trained = copy.deepcopy(model)
        if checkpointing:
            trained.gradient_checkpointing_enable()
        biases = ExpertBiases(trained, update)
        trained(**batch).logits_per_image.sum().backward()
        counts.append(torch.stack(biases.counts))
        biases.move(Accelerator(cpu=True))
        moved.append(torch.stack([router.expert_bias for router in biases.routers]))
    assert torch.equal(counts[1], 2 * counts[0]) and torch.equal(*moved) and moved[0].any(dim=1).all()


def test_biases_of_routers_that_do_not_train_stay():
    assert not ExpertBiases(tiny_model(use_expert_bias=True).requires_grad_(False)).routers


def test_a_model_without_biases_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"tuned.expert_bias_update: z_score moves biases of experts, but this model"):
        train(tmp_path, expert_bias_update="z_score")


def test_biases_are_saved_in_full_precision(tmp_path):
    """And stay what they are in a model of bfloat16."""
    folder = train(tmp_path, **BIASED, max_steps=5)
    saved = {name: value for name, value in weights(folder).items() if name.endswith("expert_bias")}
    assert saved and all(value.dtype == torch.float32 and value.any() for value in saved.values())
    half = {"dtype": torch.bfloat16}
    for model in (CLIPMoEModel.from_pretrained(folder, **half), CLIPMoEModel.from_pretrained(folder).to(**half)):
        assert model.dtype == torch.bfloat16
        for name, value in saved.items():
            found = model.get_buffer(name)
            assert found.dtype == torch.float32 and torch.equal(found, value)


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
