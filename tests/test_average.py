"""Averages of sparse models."""

import pytest
import torch
from tiny_clip_moe import tiny_model

from clip_moe.conversion.average import average
from clip_moe.conversion.upcycle import sparse_blocks


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def test_experts_that_trained_apart_keep_their_numbers(tmp_path):
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


def test_other_numbers_of_experts_have_no_mean(tmp_path):
    folders = [saved(tiny_model(num_experts=number), tmp_path / str(number)) for number in (4, 6)]
    with pytest.raises(ValueError, match="has another configuration than .*: they have no mean"):
        average(folders)
