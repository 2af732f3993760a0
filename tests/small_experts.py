"""The symbol CLIP with experts, in folders, as fixtures."""

import pytest
import torch
from transformers import CLIPModel

from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from data.worlds import build_processor


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """The symbol CLIP with four different experts."""
    folder = tmp_path_factory.mktemp("sparse")
    model = upcycle(CLIPModel.from_pretrained("training/symbol_clip"), PRESETS["clip_moe"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() / 3)
            elif ".router." in name:
                parameter.mul_(10)
    model.save_pretrained(folder)
    build_processor("symbols", 64, 32).save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture(scope="module")
def unnormalized(tmp_path_factory):
    """A CLIP-UP of the symbol CLIP with sharp routers, whose experts are all equal."""
    folder = tmp_path_factory.mktemp("unnormalized")
    model = upcycle(CLIPModel.from_pretrained("training/symbol_clip"), PRESETS["clip_up"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".router." in name:
                parameter.mul_(3)
    model.save_pretrained(folder)
    build_processor("symbols", 64, 32).save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """The symbol CLIP with fusion gates of any opening."""
    folder = tmp_path_factory.mktemp("gated")
    model = upcycle(CLIPModel.from_pretrained("training/symbol_clip"), PRESETS["clip_fmoe"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fusion_gate." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif ".experts." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std())
    model.save_pretrained(folder)
    build_processor("symbols", 64, 32).save_pretrained(folder)
    return model.eval(), folder
