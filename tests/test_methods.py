"""Methods beside the four papers, each from a dense model to a trained one, ended and resumed, and measured; its first
expert is a dense model again. Methods that change what a model computes are published, too."""

import json
import shutil

import pytest
import torch
from tiny_runs import DENSE, ended_by_a_checkpoint, read_log, run_stages, same_weights
from transformers import CLIPModel

import clip_moe
from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.evaluation.built_in_tasks import symbol_tasks
from clip_moe.evaluation.tasks import TASKS

DATA = {"source": "symbols", "num_samples": 64, "in_memory": True}
TRAINED = {"global_batch_size": 8, "max_steps": 6, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 2}
BIASES = {"scoring_func": "sigmoid", "use_expert_bias": True, "routed_scaling_factor": 2.5}


def upcycled(towers=None, **changes):
    """Settings of the stage that makes the model."""
    towers = {f"{tower}_config": towers for tower in ("text", "vision")} if towers else {}
    return {"changes": {"num_experts": 4, "norm_topk_prob": True, "capacity_factor": None, **changes}, **towers}


# Settings that make a model, settings that train it, and a value of its log
PUBLISHED = {
    "sigmoid, scaled, biases": (upcycled(BIASES, router_aux_loss_coef=0), {}, "max_violation"),
    "shared": (upcycled(num_experts=6, moe_intermediate_size=8, num_shared_experts=2), {}, None),
}
# Needs peft: run by tests/integration/test_training_settings.py
ADAPTERS = {
    "adapters": (upcycled(), {"lora": {"r": 2, "target_parameters": ["experts.up_proj", "experts.down_proj"]}}, None)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_way(tmp_path, name, monkeypatch, capsys):
    for task_name, task in symbol_tasks(50, 20, 20).items():
        monkeypatch.setitem(TASKS, task_name, task)
    made, trained, logged = (PUBLISHED | ADAPTERS)[name]
    stages = [DENSE, {"name": "sparse", "stage": "upcycle", "model": "dense", "preset": "clip_up", **made}]
    stages += [
        {"name": "tuned", "stage": "train", "model": "sparse", "data": DATA, **TRAINED, **trained},
        {"name": "experts", "stage": "analyze", "model": "tuned", "tasks": ["symbols_pairs"]},
        {"name": "scores", "stage": "evaluate", "models": {"sparse": "tuned"}, "tasks": ["symbols_retrieval"]},
        {"name": "expert", "stage": "dense", "model": "tuned", "take": 0, "scale": 1.0},
    ]
    whole = run_stages(tmp_path / "whole", stages)
    tuned, ended = whole / "tuned", tmp_path / "ended" / "out" / "tuned"
    shutil.copytree(whole, ended.parent)
    shutil.rmtree(ended)
    with ended_by_a_checkpoint():
        run_stages(tmp_path / "ended", stages)
    run_stages(tmp_path / "ended", stages)
    assert "tuned: goes on from step" in capsys.readouterr().out
    assert same_weights(tuned, ended)
    log = read_log(tuned)
    assert len([entry for entry in log if "loss" in entry]) == 4 and (logged is None or logged in log[0])
    assert (whole / "experts" / "experts.html").is_file()
    scores = json.loads((whole / "scores" / "symbols_retrieval--sparse.json").read_text())
    assert scores["num_samples"] == 20
    block = load_sparse(tuned).vision_model.encoder.layers[1].mlp
    ffn = CLIPModel.from_pretrained(whole / "expert").vision_model.encoder.layers[1].mlp
    up_proj = block.experts.up_proj[0]
    assert torch.equal(ffn.fc1.weight[: len(up_proj)], up_proj) or "shared" in name
    if name not in PUBLISHED:
        return
    clip_moe.main(["efficiency", str(whole / "dense"), str(tuned)])
    clip_moe.main(
        ["publish", str(tuned), "user/clip-moe", "--dry_run", str(tmp_path / "published"), "--license", "mit"]
    )
    assert (tmp_path / "published" / "modeling_clip_moe.py").is_file()
