"""Models of equal seconds, whether --rehearse predicts a run, and whether runs survive kills.

OMP_NUM_THREADS=1 python -m lab.speed.runs clock --output lab/speed/results/names_clock_cpu.md
"""

import contextlib
import io
import itertools
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from safetensors import safe_open

from clip_moe.engine.command_line import run_program
from clip_moe.engine.plan import wanted_stages
from clip_moe.engine.program import in_words, peak_memory
from clip_moe.engine.provenance import LOG
from clip_moe.engine.recipe import Recipe, load_recipe
from clip_moe.engine.rehearsal import Measured, measure_stages
from clip_moe.engine.runner import run_recipe
from clip_moe.engine.yaml_files import read_yaml
from clip_moe.training.stages.steps import StepsStage
from lab import ROOT, recipe_file
from lab.law.cases import RATE
from lab.speed.page import Output, Rounds, in_own_process, machine, page, table

# System -> its recipe, the stages of it that stay, and what makes them short
TRAINED = {"defaults.train.data.num_samples": 2048, "defaults.train.max_steps": 8, "defaults.train.save_steps": 3}
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CLIP-UP": ("clip_up_symbols", "dense upcycled clip_up experts", TRAINED),
    "CLIP-MoE": (
        "clip_moe_symbols",
        "features_0 clusters_1 expert_1 features_1 clusters_2 expert_2 unified clip_moe",
        TRAINED | {"defaults.embed.data.num_samples": 2048, "unified.experts": ["expert_1", "expert_2"]},
    ),
    "CLIP-FMoE": (
        "clip_fmoe_symbols",
        "captions fused features clusters sub_clusters clip_fmoe_1 clip_fmoe_2 clip_fmoe_unified clip_fmoe",
        {
            "captions.data.num_samples": 1536,
            "clusters.num_image_clusters": 2,
            "sub_clusters.num_image_clusters": 3,
            "defaults.train.save_steps": 4,
            "clip_fmoe_unified.experts": ["clip_fmoe_1", "clip_fmoe_2"],
        },
    ),
    "MoDE": (
        "mode_symbols",
        "captions clusters expert_1 expert_2 mode soup",
        TRAINED
        | {
            "defaults.embed.data.num_samples": 2048,
            "defaults.train.max_steps": None,
            "defaults.train.num_epochs": 1,
            "clusters.num_clusters": 2,
            "mode.experts": ["expert_1", "expert_2"],
            "soup.models": ["expert_1", "expert_2"],
        },
    ),
}
# Inputs of names_clock.yaml
DENSE = {"begin": "seed_model"}
WIDE = {"width": 36, "ffn_width": 144}
QUARTERS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": "1/4"}
HALVES = {"num_experts": 16, "moe_intermediate_size": "1/2"}
SPARSE = {
    "CLIP-UP": {},
    "2 of 16 halves": HALVES,
    "CLIP-UP, 36 wide": WIDE,
    "2 of 16 halves, 24 wide": HALVES | {"width": 24, "ffn_width": 96},
    "2 of 16 halves, 36 wide": HALVES | WIDE,
    "4 of 32 quarters, 36 wide": QUARTERS | WIDE,
    "4 of 32 quarters": QUARTERS,
}
# Steps of a run, and the share of them that is faster than the time that counts: a busy neighbor slows the others
TIMED_STEPS, FASTER = 60, 0.1
System = Literal[*SYSTEMS]


def step_seconds(shape: Mapping[str, Any]) -> dict[str, float]:
    """Stage of `names_clock.yaml` that trains -> seconds of a step of a shape."""
    changes = dict(shape)
    for stage in ("seed_model", "model"):
        changes |= {f"{stage}.{key}": value for key, value in {"warmup_steps": 0, "logging_steps": 1}.items()}
        changes |= {f"{stage}.data.num_samples": 8192, f"{stage}.max_steps": TIMED_STEPS}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        recipe = load_recipe(recipe_file("names_clock"), {"output_dir": folder, **changes})
        run_recipe(recipe, only=["initialized", "seed_model", "upcycled", "model"])
        seconds = {}
        for stage in ("seed_model", "model"):
            log = [json.loads(line) for line in (Path(folder) / stage / LOG).read_text().splitlines()]
            ends = [line["step"] * shape["pairs"] / line["images_per_second"] for line in log if "loss" in line]
            steps = sorted(end - start for start, end in itertools.pairwise(ends))
            seconds[stage] = steps[round(FASTER * len(steps))]
    return seconds


def clock_shapes() -> dict[str, dict[str, Any]]:
    """Name of a model -> its inputs of `names_clock.yaml`, without steps and rates."""
    dense = {f"dense, {width} wide": {"width": width, "ffn_width": 4 * width} | DENSE for width in (24, 30, 36, 44)}
    shapes = (dense | SPARSE).items()
    return {f"{name}, {pairs} pairs": {"pairs": pairs} | shape for name, shape in shapes for pairs in (512, 1024)}


def time_clock(*, output: Output = None, rounds: Rounds = 2) -> str:
    """Steps of each shape in half of the seconds of the front page's CLIP-UP, and the commands to run them."""
    step = {}
    for _ in range(rounds):
        for name, shape in clock_shapes().items():
            for stage, seconds in step_seconds(shape).items():
                step.setdefault(name, {})[stage] = min(seconds, step.get(name, {}).get(stage, math.inf))
    reference = step["CLIP-UP, 1024 pairs"]
    seconds = (1000 * reference["seed_model"] + 3000 * reference["model"]) / 2
    rows, commands = [], []
    for name, shape in clock_shapes().items():
        rate = RATE / shape.get("width", 16)
        seed_steps = round(seconds / 5 / step[name]["seed_model"])
        steps = round(seconds * 4 / 5 / step[name]["model"])
        rows.append([name, *(f"{1000 * own:.1f}" for own in step[name].values()), f"{seed_steps:,} + {steps:,}"])
        changes = shape | {"seed_steps": seed_steps, "steps": steps}
        changes |= {"seed_rate": f"{rate / 2:.2e}", "rate": f"{rate:.2e}"}
        flags = " ".join(f"--{key} {value}" for key, value in changes.items())
        folder = f"runs/clock/{name.replace(', ', '_').replace(' ', '_')}"
        commands.append(f"clip-moe run --config lab/recipes/names_clock.yaml {flags} --output_dir {folder}")
    return page(
        output,
        "# Names by the clock",
        table(["model", "ms a step of the seed model", "of the model", "steps"], rows),
        f"Of {TIMED_STEPS} steps the time that a tenth of them beat, the least of {rounds} rounds; {machine()}, beside "
        f"another run. All train for {seconds:.0f} s.",
        "```bash\n" + "\n".join(commands) + "\n```",
    )


def short_recipe(system: str, output: Path) -> tuple[Path, dict[str, Any], Recipe]:
    """The file of a system's shortened recipe beside its output, what overrides it, and the recipe."""
    name, stages, overrides = SYSTEMS[system]
    path = output.with_suffix(".yaml")
    raw = read_yaml(recipe_file(name).read_text(encoding="utf-8"), name)
    raw["stages"] = [stage for stage in raw["stages"] if stage["name"] in stages.split()]
    path.write_text(yaml.safe_dump(raw))
    return path, overrides, load_recipe(path, overrides | {"output_dir": str(output)})


def start(path: Path, output: Path, overrides: Mapping[str, Any]):
    """A process that runs a recipe; all that it prints goes to a file beside its output."""
    words = [word for key, value in overrides.items() for word in (f"--{key}", json.dumps(value))]
    command = [sys.executable, "-m", "clip_moe.training.upcycle", "--config", str(path), "--output_dir", str(output)]
    with output.with_suffix(".log").open("w") as log:
        return subprocess.Popen([*command, *words], cwd=ROOT, stdout=log, stderr=log)


def rehearsed(path: Path, overrides: Mapping[str, Any], name: str) -> Measured:
    """Measurements of a stage by a rehearsal."""
    recipe = load_recipe(path, dict(overrides))
    with contextlib.redirect_stdout(io.StringIO()):
        return measure_stages(recipe, wanted_stages(recipe, [name], None))[name]


def taken(path: Path, overrides: Mapping[str, Any], name: str) -> tuple[float | None, int]:
    """Seconds of a step of a stage, if it has steps, and the most memory of its process, which runs it."""
    recipe, device = load_recipe(path, dict(overrides)), torch.device("cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        folder = run_recipe(recipe, only=[name]) / name
    (stage,) = wanted_stages(recipe, [name], None)
    if not isinstance(stage, StepsStage):
        return None, peak_memory(device)
    speeds = [json.loads(line).get("images_per_second") for line in (folder / LOG).read_text().splitlines()]
    return stage.global_batch_size / [speed for speed in speeds if speed][-1], peak_memory(device)


def compare_rehearsals(*, output: Output = None, systems: Sequence[System] = tuple(SYSTEMS)) -> str:
    """One recipe of each system, shortened: each stage is rehearsed and run."""
    parts, columns = [], ["stage", "a step, rehearsed", "run", "ratio", "memory, rehearsed", "run", "ratio"]
    for system in systems:
        with tempfile.TemporaryDirectory() as folder:
            path, overrides, recipe = short_recipe(system, Path(folder) / "run")
            settings = path, overrides | {"output_dir": recipe.output_dir}
            rows = []
            for stage in recipe.stages:
                foretold = in_own_process(rehearsed, *settings, stage.name)
                step, memory = in_own_process(taken, *settings, stage.name)
                seconds = (
                    [f"{foretold.cost.step:.3g} s", f"{step:.3g} s", f"{foretold.cost.step / step:.2f}"]
                    if step
                    else [""] * 3
                )
                sizes = in_words(foretold.memory), in_words(memory), f"{foretold.memory / memory:.2f}"
                rows.append([stage.name, *seconds, *sizes])
        parts += [f"## {system}: {SYSTEMS[system][0]}", table(columns, rows)]
    about = f"Each stage was rehearsed, then run, in processes of their own. {machine()}."
    return page(output, "# What --rehearse says, and what a run takes", about, *parts)


def killed_after(system: str, output: Path, seconds: float) -> str | None:
    """Start a run and kill it after so long; the stage that it was in then, or None if it had finished before."""
    path, overrides, _ = short_recipe(system, output)
    process = start(path, output, overrides)
    try:
        if process.wait(seconds) != 0:
            sys.exit(output.with_suffix(".log").read_text()[-2000:])
        return None
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    partial = sorted(path.name.removesuffix(".partial") for path in output.glob("*.partial") if path.is_dir())
    return partial[0] if partial else "between two stages"


def content(path: Path) -> Any:
    """All that a file holds; of safetensors without the order of its header, which differs from run to run; of results
    the scores."""
    if path.suffix == ".json":
        return json.loads(path.read_text()).get("metrics")  # not all results have some
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()
        }, file.metadata()


def require_equal(whole: Path, killed: Path) -> None:
    patterns = ("**/*.safetensors", "**/*.arrow", "**/tokenizer.json", "*/*--*.json")
    names = [
        # without what `datasets` keeps beside a dataset that was read
        {path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern) if path.name[:6] != "cache-"}
        for folder in (whole, killed)
    ]
    different = names[0] ^ names[1]
    different |= {name for name in names[0] & names[1] if content(whole / name) != content(killed / name)}
    if different:
        sys.exit(f"{len(different)} files differ from those of a run that nobody killed: {sorted(different)[:10]}")


def kill_runs(
    *, output: Output = None, systems: Sequence[System] = tuple(SYSTEMS), kills: int = 20, seed: int | None = None
) -> str:
    """The same recipes, killed (SIGKILL) at random moments and started again. At the end every file of weights, labels
    and features has to be that of a run that nobody killed, to the bit, and every score the same.

    Args:
        kills: number of kills, over all systems together
        seed: draws the moments (default: another one each time)
    """
    chance, stages = random.Random(seed), Counter()
    for number, system in enumerate(systems):
        with tempfile.TemporaryDirectory() as folder:
            whole, killed = Path(folder) / "whole", Path(folder) / "killed"
            started = time.time()
            killed_after(system, whole, float("inf"))
            longest, left = time.time() - started, len(range(number, kills, len(systems)))
            while left:
                was_in = killed_after(system, killed, chance.uniform(0, longest))
                if was_in is None:  # it came to its end: the same once more
                    require_equal(whole, killed)
                    shutil.rmtree(killed)
                else:
                    stages[f"{system}: {was_in}"] += 1
                    left -= 1
            killed_after(system, killed, float("inf"))
            require_equal(whole, killed)
    return page(
        output,
        "# Kills of recipes",
        f"{stages.total()} kills; all weights, labels, features and scores are those of a run that nobody killed.",
        f"They came in {', '.join(f'{name} ({times})' for name, times in stages.items())}. {machine()}.",
    )


if __name__ == "__main__":
    run_program(
        "python -m lab.speed.runs",
        __doc__,
        {"clock": time_clock, "rehearsal": compare_rehearsals, "kills": kill_runs},
    )
