"""The README's examples of other programs, run as they stand: what they name is there, only smaller."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_dense_llava, sdxl, with_77_positions
from transformers import AutoProcessor, CLIPModel, CLIPTextModel, CLIPTextModelWithProjection
from transformers.distributed import DistributedConfig
from transformers.exporters import base as exporters

from modeling_clip_moe import CLIPMoEModel

ROOT = Path(__file__).parents[2]
BASE = "training/glyph_clip"
SECTION = re.search(r"\n## Drop it in\n(.*?)\n## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
EXAMPLES = re.findall(r"```(bash|python)\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture(scope="module")
def place(repository, tmp_path_factory):
    place = tmp_path_factory.mktemp("readme")
    model = with_77_positions(CLIPMoEModel.from_pretrained(repository))
    for name in ("runs/demo/clip_up", "user/clip-moe-l14", "user/clip-moe-l14-336"):
        model.save_pretrained(place / name)
        AutoProcessor.from_pretrained(repository).save_pretrained(place / name)
    save_dense_llava(place / "llava-hf" / "llava-1.5-7b-hf")
    with_77_positions(CLIPModel.from_pretrained(BASE)).save_pretrained(place / "dense")
    encoders = [tower.from_pretrained(place / "dense") for tower in (CLIPTextModel, CLIPTextModelWithProjection)]
    sdxl(*encoders).save_pretrained(place / "stabilityai" / "stable-diffusion-xl-base-1.0")
    return place


def test_there_are_examples():
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(place, number):
    if "ep_size" in EXAMPLES[number][1] and not hasattr(DistributedConfig, "ep_size"):
        pytest.skip("transformers has ep_size from 5.19 on: see the README")
    language, example = EXAMPLES[number]
    if "onnx" in example and not hasattr(exporters, "ExportedModel"):
        pytest.skip(
            "the exporter of transformers 5.17 returns torch's program, which has another method: see the README"
        )
    if "DistributedConfig" in example:
        (place / "split.py").write_text(example)
        commands = [["-m", "torch.distributed.run", "--nproc_per_node", "2", "split.py"]]
    elif language == "python":
        commands = [["-c", example]]
    else:
        commands = [line.split()[1:] for line in example.splitlines()]
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"{example}\n{done.stderr}"
