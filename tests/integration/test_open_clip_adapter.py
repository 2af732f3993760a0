"""open_clip's calls as CLIP_benchmark takes them: its scores are ours. test_families.py compares the calls."""

import json
import os

import pytest
from clip_benchmark_copy import clip_benchmark_path, save_benchmark
from documents import ROOT, blocks
from programs import run_program
from transformers import CLIPModel

import clip_moe
from modeling_clip_moe import CLIPMoDEModel
from modeling_clip_moe.open_clip_adapter import load_clip

BASE = "training/symbol_clip"


def test_clip_benchmarks_own_command_gives_our_numbers(repository, tmp_path):
    """The file of docs/integrations.md, on a copy of CLIP_benchmark's layout, beside `clip-moe evaluate`."""
    page = blocks(ROOT / "docs" / "integrations.md")
    (tmp_path / "run.py").write_text(next(b.text for b in page if b.text.startswith("# clip_moe_benchmark.py")))
    data, model = tmp_path / "data", str(repository)
    save_benchmark(data, captions=True)
    command = f"run.py eval --model_type clip_moe --model ours --pretrained {model} --dataset wds/data"
    command += f" --dataset_root {data} --task zeroshot_retrieval --no_amp --recall_k 1 5 --num_workers 2"
    path = os.pathsep.join([clip_benchmark_path(tmp_path), str(ROOT)])
    run_program(tmp_path, *command.split(), "--batch_size", 16, "--output", "theirs.json", PYTHONPATH=path)
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]
    ours = {"dataset": str(data), "image_column": "png", "task": "retrieval", "caption_column": "txt"}
    task = json.dumps(ours | {"captions_per_line": True})
    clip_moe.main(["evaluate", str(tmp_path / "ours"), "--models.ours", model, "--tasks", task])
    (result,) = (json.loads(path.read_text())["metrics"] for path in (tmp_path / "ours").glob("*--*.json"))
    for k in (1, 5):
        for name, our_direction in (("image_retrieval", "text_to_image"), ("text_retrieval", "image_to_text")):
            assert theirs[f"{name}_recall@{k}"] == pytest.approx(result[f"{our_direction}_recall@{k}"], abs=1e-6)


def test_a_dense_clip_is_taken_and_a_mixture_refused(tmp_path):
    adapter, _, tokenize = load_clip(BASE)
    assert isinstance(adapter.model, CLIPModel) and adapter.encode_text(tokenize("a star")).ndim == 2
    CLIPMoDEModel.from_experts([adapter.model, adapter.model]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expert_0"):
        load_clip(str(tmp_path))
