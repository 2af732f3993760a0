"""Shared by the integrations: a published model."""

from pathlib import Path

import pytest
from backbones import dense_clip
from documents import BASE
from PIL import Image
from tiny_clip import moved
from transformers import AutoProcessor

from clip_moe.conversion.commands import publish
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from modeling_clip_moe import CLIPMoEModel


@pytest.fixture(scope="session")
def backbone(request) -> str:
    """Of the models below: "separated", or "shared" where a test asks for both (`both_backbones`)."""
    return getattr(request, "param", "separated")


@pytest.fixture(scope="session")
def source(backbone, tmp_path_factory) -> Path:
    """Folder of an upcycled symbol CLIP, 4 experts of which 2 compute a token, whose experts and routers differ."""
    model = moved(upcycle(dense_clip(backbone), PRESETS["clip_moe"], seed=0), ("experts", "router"), 0, scale=0.02)
    folder = tmp_path_factory.mktemp("source") / "model"
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(BASE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def repository(source, tmp_path_factory) -> Path:
    """Its published folder."""
    folder = tmp_path_factory.mktemp("repository") / "clip-moe-symbols"
    publish.main([str(source), "user/clip-moe-symbols", "--dry_run", str(folder), "--license", "apache-2.0"])
    return folder


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.effect_noise((40, 32), 80).convert("RGB").save(path)
    return path


@pytest.fixture
def model(repository) -> CLIPMoEModel:
    return CLIPMoEModel.from_pretrained(repository).eval()


@pytest.fixture(scope="session")
def processor(repository):
    return AutoProcessor.from_pretrained(repository)
