"""How long CLIP-FMoE takes to train, against CLIP-MoE on the same data, captions, batch and epochs a stage.

    python -m benchmarks.training_time --output benchmarks/results/training_time_cpu.md

Runs the stages of training/recipes/clip_fmoe_symbols.yaml one after the other, with the hidden states below the trained
layers kept on disk and without, and prints the seconds of each part: embedding and clustering, experts, router. On a
CPU they are those of the processor, since other programs would disturb the clock.
The paper (section 5): 72.5 % less time than CLIP-MoE, with clustering and with all experts at once.
"""

import argparse
import contextlib
import io
import platform
import tempfile
import time
from pathlib import Path

import torch
import transformers

from records.files import write_text
from records.markdown import markdown_table
from training.recipe import load_recipe
from training.runner import run_recipe

RECIPE = Path(__file__).parents[1] / "training" / "recipes" / "clip_fmoe_symbols.yaml"
PREPARED = ["captions", "copied", "copied_for_clip_moe", "fused"]
SYSTEMS = {
    "CLIP-MoE": {
        "clusters": ["features"]
        + [f"mcl_clusters_{number}" for number in range(1, 5)]
        + [f"mcl_features_{number}" for number in range(1, 4)],
        "experts": [f"mcl_{number}" for number in range(1, 5)],
        "router": ["mcl_unified", "clip_moe"],
    },
    "CLIP-FMoE": {
        "clusters": ["features", "clusters", "sub_clusters"],
        "experts": [f"clip_fmoe_{number}" for number in range(1, 5)],
        "router": ["clip_fmoe_unified", "clip_fmoe"],
    },
}


def measure(folder: Path, kept: bool) -> dict[str, float]:
    """Seconds of every stage, in a new folder; `kept`: with hidden states on disk."""
    overrides = {"output_dir": str(folder)} | ({} if kept else {"defaults.train.hidden_states": None})
    recipe = load_recipe(RECIPE, overrides)
    wanted = {name for parts in SYSTEMS.values() for names in parts.values() for name in names} | set(PREPARED)
    wanted |= {"states"} if kept else set()
    clock = time.perf_counter if torch.accelerator.is_available() else time.process_time
    seconds = {}
    for stage in recipe.stages:
        if stage.name in wanted:
            started = clock()
            with contextlib.redirect_stdout(io.StringIO()):
                run_recipe(recipe, only=[stage.name])
            seconds[stage.name] = clock() - started
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the table")
    output = parser.parse_args().output
    rows = []
    for kept in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(Path(folder), kept)
        reference = None
        for system, parts in SYSTEMS.items():
            sums = {part: sum(seconds[name] for name in names) for part, names in parts.items()}
            states = seconds.get("states", 0.0)
            total = sum(sums.values()) + states
            reference = reference or total
            # CLIP-FMoE's experts do not wait for each other; CLIP-MoE's do.
            at_once = total
            if system == "CLIP-FMoE":
                at_once += max(seconds[name] for name in parts["experts"]) - sums["experts"]
            cells = [system, "yes" if kept else "no", f"{states:.0f}", *(f"{value:.0f}" for value in sums.values())]
            cells += [f"{total:.0f} ({total / reference - 1:+.0%})", f"{at_once:.0f} ({at_once / reference - 1:+.0%})"]
            rows.append(cells)
    header = ["system", "hidden states kept", "keeping them", "embed, cluster", "experts", "router"]
    text = (
        f"# Training time\n\n{markdown_table([*header, 'total', 'experts at once'], rows)}\n\n"
        f"Seconds; {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}. In brackets: against CLIP-MoE in the same half of the table. Every stage "
        "has one epoch of its data: an expert of CLIP-MoE sees all of them, one of CLIP-FMoE a quarter."
    )
    print(text)
    if output is not None:
        write_text(output, text)


if __name__ == "__main__":
    main()
