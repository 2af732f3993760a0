"""Mixtures of tiny experts, dense and sparse."""

import torch
from transformers import CLIPConfig, CLIPModel

from modeling_clip_moe import CLIPMoDEModel, CLIPMoEConfig, CLIPMoEModel

TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER["projection_dim"] = 8
TEXT = {**TOWER, "vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 48, "eos_token_id": 49}
VISION = {**TOWER, "image_size": 16, "patch_size": 8}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1]}


def dense(seed, projection_dim=8):
    torch.manual_seed(seed)
    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=projection_dim)).eval()


def sparse(seed):
    torch.manual_seed(seed)
    config = CLIPMoEConfig(text_config=TEXT | SPARSE, vision_config=VISION | SPARSE, projection_dim=8)
    return CLIPMoEModel(config).eval()


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
