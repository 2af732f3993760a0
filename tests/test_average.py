"""Averages of sparse models: experts in another order are the same model, and so is their mean."""

import pytest
import torch
from tiny_clip_moe import inputs, tiny_model

from clip_moe.conversion.average import average
from clip_moe.conversion.upcycle import sparse_blocks


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "fields",
    [{}, {"scoring_func": "sigmoid", "use_expert_bias": True}, {"fusion_gate": True}, {"num_experts": 9}],
    ids=["softmax", "sigmoid_with_biases", "base_and_gate", "many"],
)
@pytest.mark.parametrize("tower", ["text_model", "vision_model"])
@torch.no_grad()
def test_the_mean_with_renumbered_experts_is_the_model(tmp_path, caplog, tower, fields):
    model, batch = tiny_model(**fields), inputs()
    for block in sparse_blocks(model).values():
        if block.router.expert_bias is not None:
            block.router.expert_bias.normal_()
    first, expected = saved(model, tmp_path / "first"), model(**batch).logits_per_image
    for name, block in sparse_blocks(model).items():
        order = torch.randperm(block.num_experts) if name.startswith(tower) else torch.arange(block.num_experts)
        for tensor in (*block.router.parameters(), *block.router.buffers(), *block.experts.parameters()):
            tensor.copy_(tensor[order])
    second = saved(model, tmp_path / "second")
    torch.testing.assert_close(model(**batch).logits_per_image, expected)
    torch.testing.assert_close(average([first, second]).eval()(**batch).logits_per_image, expected)
    assert f"the experts of {second} are averaged in another order in {tower}" in caplog.text


def test_experts_that_trained_apart_keep_their_numbers(tmp_path, caplog):
    """So does every expert of an upcycled model, all of which are alike; biases of experts are averaged, too."""
    model = tiny_model(scoring_func="sigmoid", use_expert_bias=True)
    with torch.no_grad():
        for block in sparse_blocks(model).values():
            for tensor in block.experts.parameters():
                tensor.copy_(tensor[:1].expand_as(tensor))
    first = saved(model, tmp_path / "first")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.03 * torch.randn_like(tensor))
    mean = average([first, saved(model, tmp_path / "second")])
    for name, tensor in model.state_dict().items():
        assert torch.equal(mean.state_dict()[name], ((before[name].double() + tensor.double()) / 2).float()), name
    assert "another order" not in caplog.text


def test_other_numbers_of_experts_have_no_mean(tmp_path):
    folders = [saved(tiny_model(num_experts=number), tmp_path / str(number)) for number in (4, 6)]
    with pytest.raises(ValueError, match="has another configuration than .*: they have no mean"):
        average(folders)
