"""Kills a recipe of all stages at random moments, starts it again, and compares what it ends with.

    python -m benchmarks.kill_and_resume --kills 20

The recipe trains with router noise and attention dropout. SIGKILL comes up to `--longest` seconds after a run has begun
a stage that was drawn. At the end every file of weights, labels and features has to be that of a run that nobody
killed, to the bit, and every score the same.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml
from safetensors import safe_open

from records.provenance import MANIFEST, environment

ROOT = Path(__file__).parents[1]
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PAIRS = {"source": "symbols", "num_samples": 192, "in_memory": True}
NOISE = {"router_jitter_noise": 0.1, "capacity_group_size": 4, "attention_dropout": 0.1}
NOISY = {"text_config": NOISE, "vision_config": NOISE}
SEVERAL = {"data": {"source": "captions"}, "caption_weights": [0.5, 0.5]}
POLICIES = [{"policy": "full", "column": "raw_caption"}, {"policy": "first_sentence", "column": "caption"}]

DENSE = [
    {"name": "words", "stage": "tokenizer", "data": PAIRS, "vocab_size": 600, "max_length": 24},
    {"name": "dense", "stage": "initialize", "processor": "symbols", "tokenizer": "words", "projection_dim": 16}
    | {"text_config": {**TOWER, "max_position_embeddings": 24, "attention_dropout": 0.1}}
    | {"vision_config": {**TOWER, "image_size": 32, "patch_size": 16, "attention_dropout": 0.1}},
    {"name": "longer", "stage": "long_context", "model": "dense", "length": 32},
    {"name": "base", "stage": "train", "model": "longer"},
]
CLIP_UP = [
    {"name": "upcycled", "stage": "upcycle", "model": "base", "preset": "clip_up", "changes": {"num_experts": 4}}
    | NOISY,
    {"name": "clip_up", "stage": "train", "model": "upcycled"},
]
CLIP_MOE = [
    {"name": "features", "stage": "embed", "model": "base", "data": PAIRS, "batch_size": 4},
    {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2, "num_text_clusters": 2},
    {"name": "expert", "stage": "train_experts", "expert": 1, "model": "base", "clusters": "clusters"},
    {"name": "unified", "stage": "unify", "model": "base", "experts": ["expert"]},
    {"name": "clip_moe", "stage": "train_router", "model": "unified"},
]
CLIP_FMOE = [
    {"name": "captions", "stage": "captions", "model": "base", "captions": POLICIES}
    | {"data": {"source": "symbols", "num_samples": 192}},
    {"name": "fused", "stage": "upcycle", "model": "base", "preset": "clip_fmoe"}
    | {"changes": {"num_experts": 1, "num_experts_per_tok": 1}}
    | NOISY,
    {"name": "states", "stage": "hidden_states", "model": "fused", "batch_size": 4} | SEVERAL,
    {"name": "fused_expert", "stage": "train", "model": "fused", "hidden_states": "states"}
    | {"trainable": r"\.(experts|fusion_gate)\."}
    | SEVERAL,
]
MODE = [
    {"name": "sentences", "stage": "embed_captions", "encoder": "tfidf", "dim": 8, "data": PAIRS, "batch_size": 4},
    {"name": "fine", "stage": "cluster_fine", "captions": "sentences", "num_centers": 8},
    {"name": "assigned", "stage": "assign", "captions": "sentences", "centers": "fine"},
    {"name": "coarse", "stage": "cluster_coarse", "assignment": "assigned", "num_experts": 2},
    {"name": "selected", "stage": "select", "assignment": "assigned", "captions": "sentences", "metadata": ["star"]},
    {"name": "data_expert_0", "stage": "train_data_expert", "expert": 2, "model": "base", "clusters": "coarse"}
    | {"cluster": 0},
    {"name": "data_expert_1", "stage": "train_data_expert", "expert": 3, "model": "base", "clusters": "coarse"}
    | {"cluster": 1},
    {"name": "mixture", "stage": "assemble", "experts": ["data_expert_0", "data_expert_1"], "clusters": "coarse"}
    | {"captions": "sentences"},
    {"name": "mean", "stage": "average", "models": ["data_expert_0", "data_expert_1"]},
]
EVALUATION = [
    {"name": "evaluation", "stage": "evaluate", "tasks": ["symbols_pairs"]}
    | {"models": {"up": "clip_up", "moe": "clip_moe", "mixture": "mixture"}},
    {"name": "experts", "stage": "analyze", "model": "clip_moe", "tasks": ["symbols_pairs"]},
]


def recipe() -> dict:
    """All stages, each with little work."""
    train = {"data": PAIRS, "global_batch_size": 8, "max_steps": 40, "learning_rate": 1.0e-2, "save_steps": 4}
    stages = DENSE + CLIP_UP + CLIP_MOE + CLIP_FMOE + MODE + EVALUATION
    return {"output_dir": "set by the command line", "defaults": {"train": train}, "stages": stages}


def start(path: Path, output: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "training.upcycle", "--config", str(path), "--output-dir", str(output)]
    with (output.parent / f"{output.name}.log").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def kill_in(stage: str, path: Path, output: Path, seconds: float) -> str | None:
    """Start a run and kill it so long after it has begun a stage; the stage that it was in then, or None if the run had
    finished before."""
    started, process = time.time(), start(path, output)
    # What every attempt at a stage begins with; that of an earlier one may still be there
    begun = output / f"{stage}.partial" / MANIFEST
    while process.poll() is None and not (output / stage).exists():
        with contextlib.suppress(FileNotFoundError):
            if begun.stat().st_mtime > started:
                break
        time.sleep(0.002)
    time.sleep(seconds)
    if process.poll() is not None:
        if process.returncode != 0:
            raise RuntimeError(f"the run failed by itself: see {output}.log")
        return None
    process.send_signal(signal.SIGKILL)
    process.wait()
    partial = sorted(path.name.removesuffix(".partial") for path in output.glob("*.partial") if path.is_dir())
    return partial[0] if partial else "between two stages"


def content(path: Path) -> bytes | tuple:
    """All that a file holds; of safetensors without the order of its header, which differs from run to run."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        tensors = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}
        return tensors, file.metadata()


def differences(first: Path, second: Path) -> list[str]:
    """Files of arrays that are not the same to the bit, and results whose scores are not the same."""
    found = []
    for pattern in ("**/*.safetensors", "**/*.arrow", "**/tokenizer.json"):
        names = [
            # without what `datasets` keeps beside a dataset that was read
            sorted(path.relative_to(folder) for path in folder.glob(pattern) if not path.name.startswith("cache-"))
            for folder in (first, second)
        ]
        if names[0] != names[1]:
            found += sorted(str(name) for name in set(names[0]) ^ set(names[1]))
        found += [str(name) for name in names[0] if content(first / name) != content(second / name)]
    for path in first.glob("evaluation/*--*.json"):
        metrics = [json.loads((folder / path.relative_to(first)).read_text())["metrics"] for folder in (first, second)]
        found += [] if metrics[0] == metrics[1] else [path.name]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kill_and_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds from the beginning of a stage to the kill")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: another one each time)")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path, whole, killed = root / "recipe.yaml", root / "whole", root / "killed"
        path.write_text(yaml.safe_dump(recipe(), sort_keys=False), encoding="utf-8")
        if start(path, whole).wait() != 0:
            sys.exit((root / "whole.log").read_text()[-2000:])
        names, stages = [stage["name"] for stage in recipe()["stages"]], Counter()
        for stage in sorted(chance.choices(names, k=args.kills), key=names.index):
            was_in = None
            while was_in is None:
                was_in = kill_in(stage, path, killed, chance.uniform(0, args.longest))
                if was_in is None:  # it came to its end: the same once more
                    _require_equal(whole, killed)
                    shutil.rmtree(killed)
            stages[was_in] += 1
        if start(path, killed).wait() != 0:
            sys.exit((root / "killed.log").read_text()[-2000:])
        _require_equal(whole, killed)
    print(f"{stages.total()} kills; all weights, labels, features and scores are those of a run that nobody killed.")
    print("They came in " + ", ".join(f"{name} ({n})" for name, n in stages.items()) + ".")
    versions = ", ".join(f"{name} {version}" for name, version in environment()["versions"].items())
    print(f"\nCommit {environment()['commit']}, {versions}.")


def _require_equal(whole: Path, killed: Path) -> None:
    found = differences(whole, killed)
    if found:
        sys.exit(f"{len(found)} files differ from those of a run that nobody killed: {', '.join(found[:10])}")


if __name__ == "__main__":
    main()
