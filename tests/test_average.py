"""Averages of sparse models: experts in another order are the same model, and so is their mean."""

import pytest
import torch
from tiny_clip_moe import inputs, tiny_model

from clip_moe.conversion.average import average
from clip_moe.conversion.upcycle import sparse_blocks

# Fields of a configuration, and the tower whose experts are renumbered
MODELS = {
    "softmax": ({}, ""),
    "images_alone": ({}, "vision_model"),
    "texts_alone": ({}, "text_model"),
    "sigmoid_with_biases": ({"scoring_func": "sigmoid", "use_expert_bias": True}, ""),
    "base_and_gate": ({"fusion_gate": True}, ""),
    "shared_experts": ({"num_shared_experts": 1}, ""),
    "many": ({"num_experts": 9, "num_experts_per_tok": 3}, ""),
}


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def renumbered(model, tower):
    for name, block in sparse_blocks(model).items():
        if name.startswith(tower):
            order = torch.randperm(block.num_experts)
            for tensor in (*block.router.parameters(), *block.router.buffers(), *block.experts.parameters()):
                tensor.copy_(tensor[order])
    return model


@pytest.mark.parametrize("case", MODELS)
def test_the_mean_with_renumbered_experts_is_the_model(tmp_path, case, caplog):
    fields, tower = MODELS[case]
    model, read = tiny_model(**fields), inputs()
    for block in sparse_blocks(model).values():
        if block.router.expert_bias is not None:
            block.router.expert_bias.normal_()
    first = saved(model, tmp_path / "first")
    expected = model(**read).logits_per_image
    second = saved(renumbered(model, tower), tmp_path / "second")
    torch.testing.assert_close(model(**read).logits_per_image, expected)
    mean = average([first, second]).eval()
    torch.testing.assert_close(mean(**read).logits_per_image, expected)
    assert f"the experts of {second} are averaged in another order in {tower or 'text_model'}" in caplog.text


def test_experts_that_trained_apart_keep_their_numbers(tmp_path, caplog):
    """So does every expert of an upcycled model, all of which are alike."""
    model = tiny_model()
    with torch.no_grad():
        for block in sparse_blocks(model).values():
            for tensor in block.experts.parameters():
                tensor.copy_(tensor[:1].expand_as(tensor))
    first = saved(model, tmp_path / "first")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    mean = average([first, saved(model, tmp_path / "second")])
    for name, tensor in model.state_dict().items():
        assert torch.equal(mean.state_dict()[name], ((before[name].double() + tensor.double()) / 2).float()), name
    assert "another order" not in caplog.text


def test_other_numbers_of_experts_have_no_mean(tmp_path):
    folders = [saved(tiny_model(num_experts=number), tmp_path / str(number)) for number in (4, 6)]
    with pytest.raises(ValueError, match="has another configuration than .*: they have no mean"):
        average(folders)
