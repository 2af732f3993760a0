"""open_clip's calls: equal to the model's own, and taken by CLIP_benchmark, whose scores are ours."""

import json
import os
import subprocess
import sys

import pytest
import torch
from clip_benchmark_copy import clip_benchmark_path, save_benchmark
from documents import ROOT, blocks
from transformers import CLIPModel

from data import symbols
from evaluation.commands import evaluate
from modeling_clip_moe import CLIPMoDEModel
from modeling_clip_moe.open_clip_adapter import load_clip

BASE = "training/symbol_clip"


@pytest.fixture(scope="module")
def adapted(repository):
    return load_clip(str(repository))


@torch.no_grad()
def test_embeddings_are_the_models(adapted, model, processor):
    adapter, transform, tokenize = adapted
    texts = ["a red star", "a large blue heart on green paper with dots, in the upper left corner " * 4]
    inputs = processor(text=texts, padding=True, truncation=True, return_tensors="pt")
    expected = model.get_text_features(**inputs).pooler_output
    torch.testing.assert_close(adapter.encode_text(tokenize(texts)), expected)
    assert tokenize(texts).shape == (2, model.config.text_config.max_position_embeddings)
    assert torch.equal(tokenize(texts[0])[0], tokenize(texts)[0])

    image = symbols.load("test", "detailed", 1)[0]["image"]
    pixel_values = processor(images=image, return_tensors="pt").pixel_values
    assert torch.equal(transform(image)[None], pixel_values)
    expected = model.get_image_features(pixel_values).pooler_output
    torch.testing.assert_close(adapter.encode_image(pixel_values), expected)

    image_features, text_features, scale = adapter(pixel_values, tokenize(texts))
    outputs = model(**inputs, pixel_values=pixel_values)
    torch.testing.assert_close(scale * image_features @ text_features.T, outputs.logits_per_image)
    assert adapter.logit_scale.ndim == 0 and adapter(text=tokenize(texts))[0] is None


@pytest.mark.parametrize("task", ["zeroshot_classification", "zeroshot_retrieval"])
def test_clip_benchmarks_own_command_gives_our_numbers(repository, tmp_path, task):
    """The file of docs/integrations.md, on a copy of CLIP_benchmark's layout, beside `evaluation.evaluate`."""
    page = blocks(ROOT / "docs" / "integrations.md")
    (tmp_path / "run.py").write_text(next(b.text for b in page if b.text.startswith("# clip_moe_benchmark.py")))
    retrieval, data, model = task == "zeroshot_retrieval", tmp_path / "data", str(repository)
    save_benchmark(data, captions=retrieval)
    command = (
        f"run.py eval --model_type clip_moe --model ours --pretrained {model} --dataset wds/data --dataset_root {data}"
    )
    command += f" --task {task} --no_amp --recall_k 1 5 --num_workers 2 --batch_size 16 --output theirs.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([clip_benchmark_path(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]
    ours = [f"--model={model}", f"--output-dir={tmp_path / 'ours'}", f"--dataset={data}", "--image-column=png"]
    if retrieval:
        ours += ["--tasks=retrieval", "--caption-column=txt", "--captions-per-line"]
    else:
        ours += ["--tasks=zero_shot", "--label-column=cls", f"--classes={data / 'classnames.txt'}", "--templates"]
        templates = (data / "zeroshot_classification_templates.txt").read_text().splitlines()
        ours += [template.replace("{c}", "{}") for template in templates]
    evaluate.main(ours)
    (result,) = (json.loads(path.read_text())["metrics"] for path in (tmp_path / "ours").glob("*.json"))
    names = {"acc1": "accuracy", "acc5": "accuracy_top5", "mean_per_class_recall": "mean_per_class_recall"}
    for k in (1, 5):
        names |= {f"image_retrieval_recall@{k}": f"text_to_image_recall@{k}"}
        names |= {f"text_retrieval_recall@{k}": f"image_to_text_recall@{k}"}
    compared = [name for name in theirs if names[name] in result]
    assert len(compared) == (4 if retrieval else 3), (theirs, result)
    for name in compared:
        assert theirs[name] == pytest.approx(result[names[name]], abs=1e-6), name


def test_a_dense_clip_is_taken_and_a_mixture_refused(tmp_path):
    adapter, _, tokenize = load_clip(BASE)
    assert isinstance(adapter.model, CLIPModel) and adapter.encode_text(tokenize("a star")).ndim == 2
    CLIPMoDEModel.from_experts([adapter.model, adapter.model]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expert_0"):
        load_clip(str(tmp_path))
