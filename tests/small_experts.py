"""The symbol CLIP with experts, in folders, as fixtures."""

import pytest
import torch
from tiny_clip import symbol_processor
from transformers import CLIPModel

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle


def save(model, folder):
    model.save_pretrained(folder)
    symbol_processor(64, 32).save_pretrained(folder)
    return model.eval(), folder


def _upcycled(tmp_path_factory, preset, change):
    """A model and its folder, with changed experts, routers and gates."""
    torch.manual_seed(0)
    model = upcycle(CLIPModel.from_pretrained("training/symbol_clip"), PRESETS[preset])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, changed in change.items():
                if f".{part}." in name:
                    changed(parameter, torch.randn(parameter.shape, generator=generator))
    return save(model, tmp_path_factory.mktemp(preset))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Four different experts."""
    change = {"experts": lambda p, noise: p.add_(noise * p.std() / 3), "router": lambda p, _: p.mul_(10)}
    return _upcycled(tmp_path_factory, "clip_moe", change)


@pytest.fixture(scope="module")
def unnormalized(tmp_path_factory):
    """A CLIP-UP with sharp routers, whose experts are all equal."""
    return _upcycled(tmp_path_factory, "clip_up", {"router": lambda p, _: p.mul_(3)})


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """Fusion gates of any opening."""
    change = {"experts": lambda p, noise: p.add_(noise * p.std()), "fusion_gate": lambda p, noise: p.copy_(noise)}
    return _upcycled(tmp_path_factory, "clip_fmoe", change)
