"""The examples of docs/integrations.md, run as they stand: what they name is there, only smaller."""

import itertools
import shutil

import pytest
import stand_ins
from clip_benchmark_copy import clip_benchmark_path, save_benchmark
from documents import ROOT, SHOWN, blocks, run_block
from programs import run_program
from transformers.exporters import base as exporters

# Section -> its blocks, which go together
SECTIONS = {
    title: list(found)
    for title, found in itertools.groupby(blocks(ROOT / "docs" / "integrations.md"), lambda block: block.section)
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    save_benchmark(place / "my" / "wds_kinds")
    for folder in ("training", "lab"):
        (place / folder).symlink_to(ROOT / folder)
    return place


@pytest.mark.parametrize("section", SECTIONS)
def test_examples_run(place, section, hub, monkeypatch):
    """Those that name a repository of the Hub run online and then offline."""
    if section == "ONNX" and not hasattr(exporters, "ExportedModel"):
        pytest.skip("the exporter of transformers 5.17 returns torch's program, which has another method: see the page")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", clip_benchmark_path(place) if section == "CLIP_benchmark" else "")
    shown = [block for block in SECTIONS[section] if block.language not in SHOWN]
    runs = stand_ins.on_and_offline(hub, "\n".join(block.text for block in shown))
    for _ in runs:
        shutil.rmtree(place / "runs" / "llava", ignore_errors=True)
        for block in shown:
            if block.language == "bash" or block.text.startswith("# "):
                run_block(block)
            else:
                run_program(place, "-c", block.text)  # by itself: some examples change other libraries
