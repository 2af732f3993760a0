"""PEFT: LoRA on attention and on the experts, with the routers trained whole."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import symbol_inputs

from modeling_clip_moe import CLIPMoEModel

EXPERTS = ["experts.up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def batch(processor):
    return symbol_inputs(processor, "train", 16)


def adapted(model, **fields):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS, **fields)
    return get_peft_model(model, config)


def train(model, batch, steps=6):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(**batch, return_loss=True, output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model, batch):
    return model.eval()(**batch).logits_per_image


@pytest.fixture(scope="module")
def trained(repository, batch):
    """The model, adapted and trained."""
    torch.manual_seed(0)
    model = adapted(CLIPMoEModel.from_pretrained(repository), modules_to_save=["router"])
    model.losses = train(model, batch)
    return model


def test_adapters_learn_and_nothing_else_does(trained, repository):
    balanced = 2 * trained.config.router_aux_loss_coef  # what is left of the loss where both towers are balanced
    assert trained.losses[-1] - balanced < 0.8 * (trained.losses[0] - balanced)
    original = CLIPMoEModel.from_pretrained(repository).state_dict()
    parts = {"self_attn": 0, "experts": 0, "router": 0}
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0, name
            assert "lora_" in name or "router" in name
            parts[next(part for part in parts if part in name)] += parameter.numel()
        else:
            assert parameter.grad is None
            name = name.removeprefix("base_model.model.")
            for wrapper in ("base_layer.", "original_module."):
                name = name.replace(wrapper, "")
            assert torch.equal(parameter, original[name])
    assert all(parts.values())


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_adapted_experts_are_those_of_every_implementation(trained, batch, name):
    expected = logits(trained, batch)
    model = trained.get_base_model()
    model.set_experts_implementation(name)
    try:
        torch.testing.assert_close(logits(trained, batch), expected, rtol=1e-4, atol=1e-4)
    finally:
        model.set_experts_implementation("by_device")


def test_all_linear_leaves_the_experts_out(model):
    # Their weights are parameters of their own, not `nn.Linear`: they have to be named in `target_parameters`
    adapters = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    names = [name for name, parameter in adapters.named_parameters() if parameter.requires_grad]
    assert any("self_attn.out_proj" in name for name in names)
    assert not any("experts" in name for name in names)
