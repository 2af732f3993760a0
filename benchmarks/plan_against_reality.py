"""What `--plan` says, beside what a run takes: one recipe of each system on the symbol world, shortened.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_against_reality --output benchmarks/results/plan_against_reality_cpu.md

Each stage runs in a process of its own, whose peak resident set is compared with the plan's memory and what a process
holds before it begins. Parameters are counted in the files of the finished model, those that train by which tensors
changed, steps and samples in logs and features, and the disk in files while the stage runs and when it is done.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
import yaml
from safetensors import safe_open

from benchmarks.devices import described
from conversion.checkpoints import load_clip
from evaluation.costs import count_parameters
from records.files import write_text
from records.markdown import markdown_table
from records.yaml_files import read_yaml
from training.expected import AtMost
from training.plan import Row, cell, held_before, plan
from training.recipe import Recipe, load_recipe
from training.runner import wanted_stages
from training.stages.steps import StepsStage

RECIPES = Path(__file__).parents[1] / "training" / "recipes"
ABOUT = """Before an arrow stands what the plan says before the run and, where it knows more then, before the stage;
after it, where that differs, what was found. `≤` is a bound; of memory, an estimate from one. `memory` is the plan's
with what a process holds before it begins, `peak` the largest resident set of the stage's process. A stage fits if
memory is within 15 % and all else equal or below a bound; `disk at most` is one, and 100 kB of
other files do not count. {}."""
SMALL = 100_000
COLUMNS = ("parameters", "activated", "trainable", "steps", "samples", "disk", "disk at most")
# Stage -> its array with a row for each sample
COUNTED = {"embed": "image", "embed_captions": "embeddings", "assign": "labels", "hidden_states": "vision"}
# The largest resident set of a command's processes; what the benchmark itself holds would count if it started them
PEAK = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)


@dataclass(frozen=True)
class System:
    """A recipe of `training/recipes`, the stages of it that are kept, and what makes them short."""

    recipe: str
    stages: str
    overrides: dict[str, object] = field(default_factory=dict)


SYSTEMS = {
    "CLIP-UP": System(
        "clip_up_symbols",
        "dense upcycled clip_up experts",
        {"defaults.train.data.num_samples": 2048, "defaults.train.max_steps": 8, "defaults.train.save_steps": 3},
    ),
    "CLIP-MoE": System(
        "clip_moe_symbols",
        "features_0 clusters_1 expert_1 features_1 clusters_2 expert_2 unified clip_moe",
        {
            "defaults.train.data.num_samples": 2048,
            "defaults.embed.data.num_samples": 2048,
            "defaults.train.max_steps": 8,
            "defaults.train.save_steps": 3,
            "unified.experts": ["expert_1", "expert_2"],
        },
    ),
    "CLIP-FMoE": System(
        "clip_fmoe_symbols",
        "captions fused states features clusters sub_clusters clip_fmoe_1 clip_fmoe_2 clip_fmoe_unified clip_fmoe",
        {
            "captions.data.num_samples": 1536,
            "clusters.num_image_clusters": 2,
            "sub_clusters.num_image_clusters": 3,
            "defaults.train.save_steps": 4,
            "clip_fmoe_unified.experts": ["clip_fmoe_1", "clip_fmoe_2"],
        },
    ),
    "MoDE": System(
        "mode_symbols",
        "captions fine assigned clusters expert_1 expert_2 mode soup",
        {
            "defaults.train.data.num_samples": 2048,
            "defaults.embed_captions.data.num_samples": 2048,
            "defaults.train.max_steps": None,
            "defaults.train.num_epochs": 1,
            "defaults.train.save_steps": 3,
            "clusters.num_experts": 2,
            "mode.experts": ["expert_1", "expert_2"],
            "soup.models": ["expert_1", "expert_2"],
        },
    ),
}


def run(path: Path, name: str, system: System, output: Path) -> tuple[int, int]:
    """Run a stage in a process of its own: its peak resident set, and the most bytes that its folder had."""
    overrides = [word for key, value in system.overrides.items() for word in (f"--{key}", json.dumps(value))]
    command = [sys.executable, "-m", "training.upcycle", "--config", str(path), "--output-dir", str(output)]
    command = [sys.executable, "-c", PEAK, *command, "--stages", name, *overrides]
    most = 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None:
            most = max(most, size(output / f"{name}.partial"))
            time.sleep(0.02)
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        sys.exit("\n".join(lines[-20:]))
    return 1024 * int(lines[-1]), max(most, size(output / name))


def size(folder: Path) -> int:
    """Bytes of the arrays in a folder, without the headers of their files."""
    total = 0
    with contextlib.suppress(FileNotFoundError):  # just renamed
        for path in [*folder.rglob("*.safetensors")]:
            with path.open("rb") as file:
                header = 8 + int.from_bytes(file.read(8), "little")
            total += max(path.stat().st_size - header, 0)
    return total


def models_in(folder: Path) -> list[Path]:
    """The file of a model, or those of all experts of a mixture, without its encoder and centers."""
    return sorted(path for path in folder.rglob("model.safetensors") if has_config(path.parent))


def has_config(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and json.loads(file.read_text())["model_type"] in ("clip", "clip_moe")


def tensors(paths: Iterable[Path], folder: Path) -> dict[str, torch.Tensor]:
    """What these files in a folder hold."""
    found = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found |= {f"{path.parent.relative_to(folder)} {name}": file.get_tensor(name) for name in file.keys()}
    return found


def reality(recipe: Recipe, name: str, output: Path) -> dict[str, int]:
    """What a finished stage has, by the names of the plan's columns."""
    (stage,) = (stage for stage in recipe.stages if stage.name == name)
    folder, found = output / name, {"disk": size(output / name)}
    if stage.makes_model:
        weights = tensors(models_in(folder), folder)
        found["parameters"] = sum(tensor.numel() for tensor in weights.values())
        models = [load_clip(path.parent) for path in models_in(folder)]
        found["activated"] = sum(count_parameters(model)["activated"] for model in models)
    if isinstance(stage, StepsStage):
        source = output / stage.model if (output / stage.model).is_dir() else Path(stage.model)
        before = tensors(models_in(source), source)
        changed = [tensor for key, tensor in weights.items() if not torch.equal(tensor, before[key].to(tensor.dtype))]
        found["trainable"] = sum(tensor.numel() for tensor in changed)
        found["steps"] = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["step"]
        found["samples"] = found["steps"] * stage.global_batch_size
    elif stage.stage == "captions":
        found["samples"] = len(datasets.load_from_disk(str(folder)))
    elif stage.stage in COUNTED:
        arrays = tensors(sorted(folder.rglob("*.safetensors")), folder)
        found["samples"] = sum(len(array) for key, array in arrays.items() if key.split()[-1] == COUNTED[stage.stage])
    return found


def rows_of(system: System, output: Path) -> Iterator[list[str]]:
    """A row of the table for each stage: what the plan says, what was found, and whether both fit."""
    names = system.stages.split()
    path = output.with_suffix(".yaml")
    raw = read_yaml((RECIPES / f"{system.recipe}.yaml").read_text(encoding="utf-8"), system.recipe)
    raw["stages"] = [stage for stage in raw["stages"] if stage["name"] in names]
    path.write_text(yaml.safe_dump(raw))
    recipe = load_recipe(path, system.overrides | {"output_dir": str(output)})

    def planned() -> dict[str, Row]:
        rows, faults = plan(recipe, wanted_stages(recipe, names, None), 1)
        if faults:
            sys.exit("\n".join(faults))
        return {row.name: row for row in rows}

    first, process = planned(), held_before()
    for name in names:
        row = planned()[name]
        peak, most = run(path, name, system, output)
        found = reality(recipe, name, output) | {"disk at most": most}
        cells, fits = [name], True
        for column in COLUMNS:
            before, told, real = (numbers.get(column, 0) for numbers in (first[name].numbers, row.numbers, found))
            fits = fits and (column not in row.numbers or isinstance(told, str) or agree(column, told, real))
            cells.append(" → ".join(dict.fromkeys(cell(column, value) for value in (before, told, real))))
        memory = row.numbers.get("memory", 0)
        cells += _of_memory(memory, process, peak)
        fits = fits and (isinstance(memory, str) or 0.85 <= peak / (memory + process) <= 1.15)
        yield [*cells, "yes" if fits else "no"]


def agree(column: str, told: int, real: int) -> bool:
    is_bound = column == "disk at most" or isinstance(told, AtMost)
    return (is_bound and real < told) or abs(real - told) <= (SMALL if column.startswith("disk") else 0)


def _of_memory(memory: int | str, process: int, peak: int) -> list[str]:
    if isinstance(memory, str):
        return [f"unknown: {memory}", cell("memory", peak), "-"]
    return [cell("memory", memory + process), cell("memory", peak), f"{peak / (memory + process):.2f}"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_against_reality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    options = parser.parse_args(argv)
    parts = ["# What --plan says, and what a run takes", "", ABOUT.format(described(torch.device("cpu"))), ""]
    for title in options.systems:
        with tempfile.TemporaryDirectory() as folder:
            rows = []
            for row in rows_of(SYSTEMS[title], Path(folder) / "run"):
                rows.append(row)
                print(" | ".join(row), file=sys.stderr, flush=True)
        header = ["stage", *COLUMNS, "memory", "peak", "ratio", "fits"]
        parts += [f"## {title}: {SYSTEMS[title].recipe}", "", markdown_table(header, rows), ""]
    print("\n".join(parts))
    if options.output is not None:
        write_text(options.output, "\n".join(parts))


if __name__ == "__main__":
    main()
