"""
Time and memory of what a model computes, beside a peer that has its turn in the same rounds.

    python -m benchmarks.steps ffn --sizes ViT-B/16 ViT-L/14 --images 1 8 --output benchmarks/results/experts_cpu.md

ffn: one sparse FFN layer over two dense FFNs on the same tokens, for each implementation of the experts.
batches: the contrastive loss in chunks, and a step of which 32 of 128 pairs are embedded at a time, over all at once.
recipes: an optimizer step of each paper's recipe, with random weights, images and captions, beside what --plan says.
recall: retrieval's recall over a full matrix of similarities, for 5,000 images and 25,000 captions, and alone for all
    of Flickr30k in Karpathy's list.
imports: of this package over transformers' own CLIP.

Memory is that of a process of its own, beyond what it held before the computation.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip.modeling_clip import CLIPMLP

from benchmarks.page import cost, described, median_of, median_ratio, mib, page_parser, seconds, show, table
from conversion.presets import PRESETS
from conversion.upcycle import sparse_config
from evaluation.costs import SIZES, count_activations, count_largest_layer, paper_config
from evaluation.retrieval import retrieval_metrics
from evaluation.speed import in_turn
from modeling_clip_moe import CLIPMoEModel, CLIPMoEVisionConfig
from modeling_clip_moe.modeling_clip_moe import CLIPMoEExperts
from training.losses import contrastive_loss

# Forward and backward, of which only the input has a gradient, or also the weights
MODES = ("forward", "frozen", "trained")
TOP_K = 2
# What a stage of a recipe trains: the recipe, the stage, the preset of its model and what the recipe changes of it
RECIPES = {
    "dense, all weights": ("mode_metaclip_400m", "expert_0", None, {}),
    "CLIP-UP": ("clip_up", "clip_up", "clip_up", {}),
    "CLIP-MoE, an expert": ("clip_moe_sharegpt4v", "expert_1", None, {}),
    "CLIP-MoE, routers": ("clip_moe_sharegpt4v", "clip_moe", "clip_moe", {}),
    "CLIP-FMoE, an expert": (
        "clip_fmoe_sharegpt4v",
        "expert_1",
        "clip_fmoe",
        {"num_experts": 1, "num_experts_per_tok": 1},
    ),
    "CLIP-FMoE, routers": ("clip_fmoe_sharegpt4v", "clip_fmoe", "clip_fmoe", {}),
}
SMALL, FLICKR30K, DIMENSIONS = (5_000, 25_000), (31_014, 155_070), 768
IMPORTS = {"CLIP": "from transformers import CLIPModel, CLIPProcessor", "own": "import modeling_clip_moe"}


def ffn_ratios(
    size: str,
    images: int,
    num_experts: int,
    rounds: int,
    implementations: Sequence[str] = ("by_device",),
    modes: Sequence[str] = MODES,
    dropped: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[tuple[str, str], float]:
    """(implementation, mode) -> time over `TOP_K` dense FFNs on the same tokens: medians of `rounds` training steps,
    and of five times as many forwards, which are short.

    Args:
        size: of `evaluation.costs.SIZES`, the vision tower.
        dropped: the share of the choices that capacity drops.
    """
    device, vision = torch.device(device), paper_config(size).vision_config
    config = CLIPMoEVisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_attention_heads=vision.num_attention_heads,
        num_experts=num_experts,
        num_experts_per_tok=TOP_K,
    )
    num_tokens = images * ((vision.image_size // vision.patch_size) ** 2 + 1)
    torch.manual_seed(0)
    hidden_states = torch.randn(num_tokens, config.hidden_size, device=device, dtype=dtype)
    weights, ids = torch.rand(num_tokens, num_experts, device=device).softmax(dim=-1).topk(TOP_K)
    ids = ids.where(torch.rand_like(weights) >= dropped, num_experts)
    experts = CLIPMoEExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    dense = [CLIPMLP(config).to(device, dtype) for _ in range(TOP_K)]

    def call(name: str, mode: str) -> float:
        inputs = hidden_states.clone().requires_grad_(mode != "forward")
        modules, arguments = (dense, [inputs]) if name == "dense" else ([experts], [inputs, ids, weights])
        config._experts_implementation = config._experts_implementation if name == "dense" else name

        def run() -> None:
            with torch.set_grad_enabled(mode != "forward"):
                output = sum(module(*arguments) for module in modules)
                if mode != "forward":
                    output.float().square().mean().backward()
            for module in modules:
                module.zero_grad()

        return seconds(run, device)

    ratios = {}
    for mode in modes:
        for module in (experts, *dense):
            module.train(mode != "forward").requires_grad_(mode != "frozen")
        calls = {name: partial(call, name, mode) for name in ("dense", *implementations)}
        times = in_turn(calls, 5 * rounds if mode == "forward" else rounds, warm_up=1)
        ratios |= {(name, mode): median_ratio(times[name], times["dense"]) for name in implementations}
    return ratios


def ffn(options: argparse.Namespace) -> Iterator[str]:
    rows = []
    for size, images, num_experts in itertools.product(options.sizes, options.images, options.num_experts):
        ratios = ffn_ratios(
            size,
            images,
            num_experts,
            options.rounds,
            options.implementations,
            dtype=getattr(torch, options.dtype),
            device=options.device,
        )
        for name in options.implementations:
            rows.append([size, options.dtype, images, num_experts, name, *(f"{ratios[name, m]:.2f}" for m in MODES)])
    yield "# Experts implementations"
    yield (
        f"Time of a sparse FFN over {TOP_K} dense FFNs on the same tokens (1.00: no overhead), medians of "
        f"{options.rounds} alternating runs, five times as many of a forward: the forward; forward and backward with "
        f"frozen weights, as where routers train; and all. {described(options.device)}."
    )
    yield table(["layer", "dtype", "images", "experts", "implementation", *MODES], rows)


def loss(pairs: int, chunk_size: int | None) -> Callable[[], None]:
    """Computes the loss of random embeddings, and its gradient."""
    torch.manual_seed(0)
    embeds = [F.normalize(torch.randn(pairs, DIMENSIONS), dim=1).requires_grad_() for _ in range(2)]
    return lambda: contrastive_loss(*embeds, torch.tensor(100.0), chunk_size).backward()


def step(pairs: int, mini_batch_size: int | None) -> Callable[[], object]:
    """Computes the gradient of a batch of random pairs by a small CLIP-UP."""
    from training.contrastive_task import ContrastiveTask
    from training.gradient_cache import cached_gradient
    from training.stages.train import TrainStage

    torch.manual_seed(0)
    tower = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 1000, "max_position_embeddings": 32, "bos_token_id": 998, "eos_token_id": 999}
    dense = CLIPConfig(text_config=text, vision_config={**tower, "image_size": 96, "patch_size": 16})
    config = sparse_config(dense, PRESETS["clip_up"])
    config.text_config.capacity_group_size = config.vision_config.capacity_group_size = 8
    model = CLIPMoEModel(config).train()
    batch = random_batch(model, pairs, 32, 1)
    data = {"source": "symbols", "num_samples": pairs}
    settings = TrainStage(
        name="step", stage="train", model="-", data=data, global_batch_size=pairs, max_steps=1, learning_rate=1e-3
    )
    task, accelerator = ContrastiveTask(model, settings), Accelerator(cpu=True)
    if mini_batch_size is None:
        return lambda: task(batch)[0].backward()
    return lambda: float(cached_gradient(accelerator, task, model, batch, mini_batch_size, 0, 1.0, True)[0])


def random_batch(model, pairs: int, tokens: int, captions: int) -> dict[str, torch.Tensor]:
    vision, text = model.config.vision_config, model.config.text_config
    ids = torch.randint(1, text.vocab_size - 2, (pairs * captions, tokens))
    ids[:, -1] = text.eos_token_id
    pixels = torch.randn(pairs, 3, vision.image_size, vision.image_size)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return batch | ({} if captions == 1 else {"caption_mask": torch.ones(pairs, captions, dtype=torch.bool)})


def parts_ratios(prepare: Callable, pairs: int, part: int, rounds: int) -> tuple[list[dict], list[dict], float, float]:
    """What a computation costs as a whole and in parts in each round, and the ratios of memory and of time."""
    calls = {"whole": partial(cost, prepare, pairs, None), "parts": partial(cost, prepare, pairs, part)}
    costs = in_turn(calls, rounds)
    whole, parts = costs["whole"], costs["parts"]
    times = median_ratio(*([result["cpu"] for result in results] for results in (parts, whole)))
    return whole, parts, median_of(parts, "memory") / median_of(whole, "memory"), times


def batches(options: argparse.Namespace) -> Iterator[str]:
    rows = []
    for what, prepare, pairs, part in (
        (f"loss of 32768 x {DIMENSIONS}, chunks of 1024", loss, 32768, 1024),
        ("step of 128 pairs, 32 at a time", step, 128, 32),
    ):
        whole, parts, memory, time = parts_ratios(prepare, pairs, part, options.rounds)
        held = [mib(median_of(results, "memory")) for results in (whole, parts)]
        rows.append([what, *held, f"{memory:.3f} (1/{1 / memory:.1f})", f"{time:.2f}"])
    for pairs in (256, 512):
        larger, smaller = cost(step, pairs, 32)["memory"], median_of(parts, "memory")
        what = f"step of {pairs} pairs, 32 at a time, over one of 128"
        rows.append([what, mib(smaller), mib(larger), f"{larger / smaller:.2f}", ""])
    yield "# Large batches"
    yield (
        "Forward and backward. The step is that of a CLIP-UP of width 256 with 6 layers, images of 36 patches, texts "
        f"of 32 tokens. Medians of {options.rounds} alternating runs, float32, {described()}."
    )
    yield table(["case", "memory, plain", "memory", "ratio", "time ratio"], rows)


def recipe_step(name: str, options: argparse.Namespace) -> Callable[[], dict[str, float]]:
    """Takes two steps of a recipe, of which the second is timed."""
    from training.contrastive_task import ContrastiveTask
    from training.engine import checkpoint_layers
    from training.gradient_cache import cached_gradient
    from training.optimizers import make_optimizer, set_trainable
    from training.recipe import load_recipe

    file, stage_name, preset, changes = RECIPES[name]
    stages = load_recipe(Path(__file__).parents[1] / "training" / "recipes" / f"{file}.yaml").stages
    (stage,) = (stage for stage in stages if stage.name == stage_name)
    (tokens,) = [stage.length for stage in stages if stage.stage == "long_context"] or [77]
    (size, *_), (pairs, *_), device = options.sizes, options.images, torch.device(options.device)
    captions, part = len(stage.caption_weights or [1]), options.mini_batch_size
    config = paper_config(size)
    config.text_config.max_position_embeddings = tokens
    if preset is not None:
        config = sparse_config(config, replace(PRESETS[preset], **changes))

    def take() -> dict[str, float]:
        torch.manual_seed(0)
        with torch.device(device):
            model = (CLIPModel if preset is None else CLIPMoEModel)(config).train()
        sizes = [model.get_parameter(name).numel() for name in set_trainable(model, stage.trainable)[0]]
        if options.gradient_checkpointing:
            checkpoint_layers(model)
        mixed = "no" if options.dtype == "float32" else "bf16"
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed)
        task = ContrastiveTask(model, stage).train()
        task, optimizer = accelerator.prepare(task, make_optimizer(task, stage, device))

        def one(batch: dict[str, torch.Tensor]) -> None:
            if part is None:
                value, _ = task({key: value.to(device) for key, value in batch.items()})
                accelerator.backward(value)
            else:
                value, _ = cached_gradient(accelerator, task, model, batch, part, 0, 1.0, True)
            if not torch.isfinite(value):
                raise ValueError(f"{name}: the loss is {value.item()}")
            optimizer.step()
            optimizer.zero_grad()

        times = [seconds(partial(one, random_batch(model, pairs, tokens, captions)), device) for _ in range(2)]
        texts, total = captions * tokens, sum(parameter.numel() for parameter in model.parameters())
        activations = count_activations(model, options.gradient_checkpointing, texts)
        activations += count_largest_layer(model, texts)
        told = 4 * total + 12 * (sum(sizes) + max(sizes)) + (part or pairs) * (4 if mixed == "no" else 2) * activations
        return {"parameters": total, "trainable": sum(sizes), "seconds": times[-1], "plan": told}

    return take


def recipes(options: argparse.Namespace) -> Iterator[str]:
    rows = []
    for name in options.recipes:
        try:
            row = cost(recipe_step, name, options)
        except Exception as error:  # of one row: too little memory ends a process or raises
            rows.append([name, f"failed: {error}", *[""] * 5])
            continue
        found, held = row["result"], row["memory"]
        cells = [f"{found[key] / 1e6:,.0f} M" for key in ("parameters", "trainable")]
        cells += [f"{options.images[0] / found['seconds']:.3g}"]
        cells += [f"{number / 2**30:.2f} GiB" for number in (held, found["plan"])]
        rows.append([name, *cells, f"{held / found['plan']:.2f}"])
    yield f"# One step of each recipe, {options.sizes[0]}"
    at_a_time = f", {options.mini_batch_size} at a time" if options.mini_batch_size else ""
    yield (
        f"{options.images[0]} pairs{at_a_time}, {options.dtype}, gradient checkpointing "
        f"{'on' if options.gradient_checkpointing else 'off'}. {described(options.device)}."
    )
    yield table(["recipe", "parameters", "trainable", "pairs/s", "memory", "by --plan", "ratio"], rows)


def random_embeddings(num_images: int, num_texts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, captions that lie about them, and the image of each caption."""
    rng = np.random.default_rng(0)
    image_of_text = np.arange(num_texts) % num_images
    images, texts = (rng.standard_normal((number, DIMENSIONS), np.float32) for number in (num_images, num_texts))
    for start in range(0, num_texts, 1000):  # a little at a time, lest the memory of this be that of the process
        part = slice(start, start + 1000)
        texts[part] = 5 * texts[part] + images[image_of_text[part]]
        texts[part] /= np.linalg.norm(texts[part], axis=1, keepdims=True)
    for start in range(0, num_images, 1000):
        images[start : start + 1000] /= np.linalg.norm(images[start : start + 1000], axis=1, keepdims=True)
    return images, texts, image_of_text


def full_matrix_recall(images: np.ndarray, texts: np.ndarray, image_of_text: np.ndarray) -> dict[str, float]:
    """Recall with all similarities in memory, by torch's `topk`: no ties are looked at."""
    similarity = torch.as_tensor(images) @ torch.as_tensor(texts).T
    right = torch.as_tensor(image_of_text)
    hits = {"image_to_text": right[similarity.topk(10).indices] == torch.arange(len(images))[:, None]}
    hits["text_to_image"] = similarity.T.topk(10).indices == right[:, None]
    return {
        f"{name}_recall@{k}": of[:, :k].any(1).double().mean().item() for name, of in hits.items() for k in (1, 5, 10)
    }


METHODS = {"ours": retrieval_metrics, "a plain full matrix": full_matrix_recall}


def recall_of(method: str, num_images: int, num_texts: int) -> Callable[[], dict[str, float]]:
    return partial(METHODS[method], *random_embeddings(num_images, num_texts))


def recall(options: argparse.Namespace) -> Iterator[str]:
    costs = in_turn({name: partial(cost, recall_of, name, *SMALL) for name in METHODS}, options.rounds)
    rows = []
    for name, sizes, results in (*((name, SMALL, costs[name]) for name in METHODS), ("ours", FLICKR30K, None)):
        relative = (
            ""
            if results is None
            else f"{median_of(results, 'cpu') / median_of(costs['a plain full matrix'], 'cpu'):.2f}"
        )
        results = results or [cost(recall_of, name, *sizes)]
        held = [mib(median_of(results, key)) for key in ("before", "memory")]
        rows.append([name, *map("{:,}".format, sizes), f"{median_of(results, 'cpu'):.1f}", relative, *held])
    yield f"# Retrieval at {DIMENSIONS} dimensions"
    yield table(["", "images", "captions", "seconds", "relative", "with the embeddings", "more for recall"], rows)
    yield (
        f"Recall at 1, 5 and 10 in both directions. Medians of {options.rounds} rounds in turn; the large one once. A "
        f"full matrix of {FLICKR30K[0]:,} x {FLICKR30K[1]:,} would take {mib(4 * FLICKR30K[0] * FLICKR30K[1])}. "
        f"{described()}."
    )


def import_seconds(statement: str) -> float:
    """Of the processor, of a process which only imports: other programs disturb it least."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(options: argparse.Namespace) -> Iterator[str]:
    # The first round reads files into the page cache and compiles them
    times = in_turn({name: partial(import_seconds, text) for name, text in IMPORTS.items()}, options.rounds, warm_up=1)
    yield "# Import time"
    yield table(
        ["import", "seconds", "ratio"],
        [
            [IMPORTS[name], f"{statistics.median(of):.2f}", f"{median_ratio(of, times['CLIP']):.3f}"]
            for name, of in times.items()
        ],
    )
    yield (
        f"Median seconds of the processor over {options.rounds} processes each, one after the other in turn, and the "
        f"median ratio of the pairs. {described()}."
    )


COMMANDS = {command.__name__: command for command in (ffn, batches, recipes, recall, imports)}


def main(argv: list[str] | None = None) -> None:
    parser = page_parser("steps", __doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["ViT-B/16"], help="recipes: one")
    parser.add_argument("--images", "--batch", nargs="+", type=int, default=[8], help="or pairs; recipes: one")
    parser.add_argument("--num-experts", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--implementations", nargs="+", default=["by_device", "eager", "grouped_mm"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--mini-batch-size", type=int, help="pairs of a recipe's step that are embedded at a time")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of recipes: by autocast")
    parser.add_argument("--device", default=device, help=f"default: {device} here")
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every case has its turn")
    options = parser.parse_args(argv)
    try:
        show(options.output, *COMMANDS[options.what](options))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
