"""The examples of docs/integrations.md, run as they stand: what they name is there, only smaller."""

import itertools

import pytest
from clip_benchmark_copy import clip_benchmark_path, save_benchmark
from documents import ROOT, SHOWN, blocks, run_block
from programs import run_program
from stand_ins import BASE, with_77_positions
from tiny_models import save_dense_llava, sdxl
from transformers import AutoProcessor, CLIPModel, CLIPTextModel, CLIPTextModelWithProjection
from transformers.exporters import base as exporters

from modeling_clip_moe import CLIPMoEModel

# Section -> its blocks, which go together
SECTIONS = {
    title: list(found)
    for title, found in itertools.groupby(blocks(ROOT / "docs" / "integrations.md"), lambda block: block.section)
}


@pytest.fixture(scope="module")
def place(repository, tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    model = with_77_positions(CLIPMoEModel.from_pretrained(repository))
    for name in ("runs/clip_moe_demo/clip_moe", "user/clip-moe-l14", "user/clip-moe-l14-336"):
        model.save_pretrained(place / name)
        AutoProcessor.from_pretrained(repository).save_pretrained(place / name)
    save_dense_llava(place / "llava-hf" / "llava-1.5-7b-hf")
    with_77_positions(CLIPModel.from_pretrained(BASE)).save_pretrained(place / "dense")
    save_benchmark(place / "my" / "wds_kinds")
    (place / "training").symlink_to(ROOT / "training")
    encoders = [tower.from_pretrained(place / "dense") for tower in (CLIPTextModel, CLIPTextModelWithProjection)]
    sdxl(*encoders).save_pretrained(place / "stabilityai" / "stable-diffusion-xl-base-1.0")
    return place


def test_there_are_examples():
    assert len(SECTIONS) >= 10


@pytest.mark.parametrize("section", SECTIONS)
def test_examples_run(place, section, monkeypatch):
    if section == "ONNX" and not hasattr(exporters, "ExportedModel"):
        pytest.skip("the exporter of transformers 5.17 returns torch's program, which has another method: see the page")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", clip_benchmark_path(place) if section == "CLIP_benchmark" else "")
    for block in SECTIONS[section]:
        if block.language in SHOWN:
            continue
        if block.language == "bash" or block.text.startswith("# "):
            run_block(block)
            continue
        run_program(place, "-c", block.text)  # by itself: some examples change other libraries
