"""Mixtures of tiny experts, dense and sparse."""

import torch
from tiny_clip_moe import dense_clip, tiny_config, tiny_model

from modeling_clip_moe import CLIPMoDEModel


def dense(seed, projection_dim=8):
    torch.manual_seed(seed)
    config = tiny_config((), num_hidden_layers=2)
    config.projection_dim = projection_dim
    return dense_clip(config)


def sparse(seed):
    torch.manual_seed(seed)
    return tiny_model([1], num_hidden_layers=2)


def unit(*shape, seed=0):
    embeds = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(embeds, dim=-1)


def mixture(number=4, make=dense):
    return CLIPMoDEModel.from_experts(
        [make(seed) for seed in range(number)], unit(12, 6), torch.arange(12) % number, "tfidf"
    ).eval()


def texts_and_images():
    torch.manual_seed(1)
    return {
        "input_ids": torch.tensor([[48, 3, 4, 49, 1], [48, 7, 49, 1, 1], [48, 9, 5, 3, 49]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
