"""
One optimizer step of each paper's recipe at real size, with random weights, images and captions: memory and speed.

    python -m benchmarks.real_steps --size ViT-L/14 --batch 8 --output benchmarks/results/real_steps_cpu.md

Every row runs in a process of its own. Its memory stands beside what `--plan` says: that of weights, gradients and
AdamW's moments, and that of activations for each pair that is computed at a time.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import CLIPModel

from benchmarks.devices import described, peak_memory, synchronize
from conversion.presets import PRESETS
from conversion.upcycle import sparse_config
from evaluation.costs import SIZES, count_activations, count_largest_layer, paper_config
from modeling_clip_moe import CLIPMoEModel
from records.files import write_text
from training.contrastive_task import ContrastiveTask
from training.engine import checkpoint_layers
from training.freezing import set_trainable
from training.gradient_cache import cached_gradient
from training.losses import contrastive_loss, multi_positive_loss, router_losses
from training.optimizers import make_optimizer


@dataclass(frozen=True)
class Recipe:
    """What a stage of a recipe trains.

    Args:
        stage: of `training/recipes`, as FILE:STAGE.
        preset: of its model; None: dense.
        trainable, balance_top_k, balance_mean, caption_weights: the stage's settings.
        tokens: of a caption.
        changes: of the preset.
    """

    stage: str
    preset: str | None = None
    trainable: str = "."
    balance_top_k: int | None = None
    balance_mean: str = "tower"
    caption_weights: tuple[float, ...] | None = None
    tokens: int = 77
    changes: tuple[tuple[str, int], ...] = ()


RECIPES = {
    "dense, all weights": Recipe("mode_metaclip_400m:expert_0"),
    "CLIP-UP": Recipe("clip_up:clip_up", "clip_up"),
    "CLIP-MoE, an expert": Recipe("clip_moe_sharegpt4v:expert_1", trainable=r"\.mlp\.", tokens=248),
    "CLIP-MoE, routers": Recipe("clip_moe_sharegpt4v:clip_moe", "clip_moe", r"\.mlp\.router\.", 1, "layer", tokens=248),
    "CLIP-FMoE, an expert": Recipe(
        "clip_fmoe_sharegpt4v:expert_1",
        "clip_fmoe",
        r"\.mlp\.(experts|fusion_gate)\.",
        caption_weights=(0.1, 0.9),
        tokens=248,
        changes=(("num_experts", 1), ("num_experts_per_tok", 1)),
    ),
    "CLIP-FMoE, routers": Recipe(
        "clip_fmoe_sharegpt4v:clip_fmoe",
        "clip_fmoe",
        r"\.mlp\.(router|fusion_gate)\.",
        balance_mean="token",
        caption_weights=(0.1, 0.9),
        tokens=248,
    ),
}


@dataclass(frozen=True)
class Settings:
    """Those that a task and an optimizer read of a stage: machines without pydantic run this benchmark, too."""

    recipe: Recipe
    chunk_size: int | None
    name: str = "step"
    optimizer: str = "adamw"
    learning_rate: float = 1e-5
    weight_decay: float = 0.05
    decay_all: bool = False
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6

    def contrastive_loss(self, images, texts, scale, caption_mask):
        if caption_mask is None:
            return contrastive_loss(images, texts, scale, self.chunk_size)
        weights = torch.tensor(self.recipe.caption_weights, device=images.device)
        texts = texts.view(*caption_mask.shape, -1)
        return multi_positive_loss(images, texts, scale, weights, caption_mask, self.chunk_size)

    def router_loss(self, config, outputs, attention_mask):
        return router_losses(config, outputs, attention_mask, self.recipe.balance_top_k, self.recipe.balance_mean)


def random_model(size: str, recipe: Recipe, device: torch.device):
    """A CLIP of a paper's size with random weights."""
    config = paper_config(size)
    config.text_config.max_position_embeddings = recipe.tokens
    if recipe.preset is not None:
        preset = PRESETS[recipe.preset]
        config = sparse_config(config, replace(preset, **dict(recipe.changes)))
    torch.manual_seed(0)
    with torch.device(device):
        return (CLIPModel if recipe.preset is None else CLIPMoEModel)(config).train()


def random_batch(model, recipe: Recipe, pairs: int) -> dict[str, torch.Tensor]:
    vision, text = model.config.vision_config, model.config.text_config
    captions = len(recipe.caption_weights or [1])
    ids = torch.randint(1, 40_000, (pairs * captions, recipe.tokens))
    ids[:, -1] = text.eos_token_id
    pixels = torch.randn(pairs, 3, vision.image_size, vision.image_size)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return batch | ({} if captions == 1 else {"caption_mask": torch.ones(pairs, captions, dtype=torch.bool)})


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Takes two steps of a recipe, of which the second is timed."""
    recipe, device = RECIPES[name], torch.device(options.device)
    held_before = peak_memory()
    model = random_model(options.size, recipe, device)
    sizes = [model.get_parameter(parameter).numel() for parameter in set_trainable(model, recipe.trainable)[0]]
    trainable = sum(sizes)
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=options.mixed_precision)
    task = ContrastiveTask(model, Settings(recipe, options.loss_chunk_size)).train()
    task, optimizer = accelerator.prepare(task, make_optimizer(task, task.losses, device))
    seconds = []
    for _ in range(options.steps):
        batch = random_batch(model, recipe, options.batch)
        synchronize(device)
        start = time.perf_counter()
        if options.mini_batch_size is None:
            loss, _ = task({key: value.to(device) for key, value in batch.items()})
            accelerator.backward(loss)
        else:
            loss, _ = cached_gradient(accelerator, task, model, batch, options.mini_batch_size, 0, 1.0, True)
        if not torch.isfinite(loss):
            raise ValueError(f"{name}: the loss is {loss.item()}")
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    checkpointing, pairs = options.gradient_checkpointing, options.mini_batch_size or options.batch
    captions = len(recipe.caption_weights or [1])
    texts = captions * recipe.tokens
    activations = count_activations(model, checkpointing, texts) + count_largest_layer(model, texts)
    number_size = 4 if options.mixed_precision == "no" else 2
    total = sum(parameter.numel() for parameter in model.parameters())
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    held = held or peak_memory() - held_before
    return {
        "parameters": total,
        "trainable": trainable,
        "seconds": seconds[-1],
        "held": held,
        "plan": 4 * total + 12 * (trainable + max(sizes)) + pairs * number_size * activations,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="ViT-L/14", help="of the model (default: %(default)s)")
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        default=list(RECIPES),
        metavar="RECIPE",
        help=f"any of {', '.join(map(repr, RECIPES))} (default: all)",
    )
    parser.add_argument("--batch", type=int, default=8, help="pairs of a step (default: 8)")
    parser.add_argument("--mini-batch-size", type=int, help="pairs that are embedded at a time")
    parser.add_argument("--loss-chunk-size", type=int, help="rows of similarities at a time (default: all)")
    parser.add_argument("--steps", type=int, default=2, help="of which the last is timed (default: 2)")
    parser.add_argument(
        "--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="as in the recipes"
    )
    parser.add_argument(
        "--mixed-precision",
        choices=["no", "bf16"],
        default="bf16" if on_gpu else "no",
        help="autocast (default: %(default)s here)",
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s here")
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    parser.add_argument("--one", choices=RECIPES, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    if options.one is not None:
        print(json.dumps(measure(options.one, options)))
        return

    arguments = list(sys.argv[1:] if argv is None else argv)
    rows = []
    for name in options.recipes:
        command = [sys.executable, "-m", "benchmarks.real_steps", *arguments, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append(f"| {name} | failed: {(done.stderr.strip().splitlines() or [''])[-1]} | | | | | |")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            f"| {name} | {row['parameters'] / 1e6:,.0f} M | {row['trainable'] / 1e6:,.0f} M | "
            f"{options.batch / row['seconds']:.3g} | {row['held'] / 2**30:.2f} GiB | {row['plan'] / 2**30:.2f} GiB | "
            f"{row['held'] / row['plan']:.2f} |"
        )
    table = "\n".join(
        [
            f"# One step of each recipe, {options.size}",
            "",
            f"{options.batch} pairs"
            f"{f', {options.mini_batch_size} at a time' if options.mini_batch_size else ''}, mixed precision "
            f"{options.mixed_precision}, gradient checkpointing {'on' if options.gradient_checkpointing else 'off'}. "
            f"{described(torch.device(options.device))}.",
            "",
            "| recipe | parameters | trainable | pairs/s | memory | by --plan | ratio |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    if options.output is not None:
        write_text(options.output, table + "\n")


if __name__ == "__main__":
    main()
