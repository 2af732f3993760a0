"""Dense CLIPs for the symbols, with an encoder for each tower and with one for both."""

import pytest
import torch
from documents import BASE
from transformers import CLIPConfig, CLIPModel

from clip_moe.conversion.upcycle import shared_config
from modeling_clip_moe import CLIPMoEModel

# For tests of what a model with one encoder has to pass as well
both_backbones = pytest.mark.parametrize("backbone", ["separated", "shared"], indirect=True, scope="session")


def dense_clip(backbone: str) -> CLIPModel | CLIPMoEModel:
    """The first two layers of the symbol CLIP, so that exporters and compilers are quick, or those of its text tower in
    both towers."""
    config = CLIPConfig.from_pretrained(BASE)
    for tower in (config.text_config, config.vision_config):
        tower.num_hidden_layers = 2
    base = CLIPModel.from_pretrained(BASE, config=config)
    if backbone == "separated":
        return base
    text, vision = base.config.text_config, base.config.vision_config
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        setattr(vision, name, getattr(text, name))
    torch.manual_seed(0)
    model = CLIPMoEModel(shared_config(base.config)).eval()
    model.text_model.load_state_dict(base.text_model.state_dict())
    return model
