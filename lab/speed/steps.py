"""Time and memory of what a model computes, beside a peer that has its turn in the same rounds.

    python -m lab.speed.steps block --sizes ViT-B/16 ViT-L/14 --images 1 8 --output lab/speed/results/block_cpu.md

Memory is that of a process of its own, beyond what it held before the computation.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import CLIPConfig, CLIPModel, PreTrainedModel
from transformers.models.clip.modeling_clip import CLIPMLP

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_config
from clip_moe.engine.command_line import run_program
from clip_moe.evaluation.costs import count_multiply_adds, meta_model, paper_config
from clip_moe.evaluation.speed import in_turn, wait_for
from clip_moe.training.losses import contrastive_loss
from lab.speed.page import Output, Rounds, cost, machine, median_of, median_ratio, page, seconds, table
from modeling_clip_moe import CLIPMoEModel, CLIPMoEVisionConfig
from modeling_clip_moe.families import model_class
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock

if TYPE_CHECKING:
    from clip_moe.training.loop import FirstFault
    from clip_moe.training.stages.train import TrainStage

# Forward and backward, of which only the input has a gradient, or also the weights
MODES = ("forward", "frozen", "trained")
TOP_K = 2
# FLOP/s of dense products in bfloat16, by the name of the GPU
PEAKS = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
# Steps before those that are timed, and those: the first ones compile and fill caches
WARM_UP, TIMED = 3, 5
# Calls of a block that are queued before a GPU is waited for, as the layers of a tower are
QUEUED = 10


class Row(NamedTuple):
    """Model, data and settings that one stage of a recipe trains with.

    Args:
        recipe, stage: names.
        preset: the preset of its model; None for a dense one.
        changes: what the recipe changes of the preset.
        tokens: the length of a text; None for the recipe's.
    """

    recipe: str
    stage: str
    preset: str | None = None
    changes: Mapping[str, Any] = MappingProxyType({})
    tokens: int | None = None


CLIP_UP, ONE_EXPERT = ("clip_up", "clip_up", "clip_up"), {"num_experts": 1, "num_experts_per_tok": 1}
RECIPES = {
    "dense, all weights": Row("mode_metaclip_400m", "expert_0"),
    "CLIP-UP": Row(*CLIP_UP),
    "CLIP-UP, texts of 24 tokens": Row(*CLIP_UP, tokens=24),
    "CLIP-MoE, all weights": Row("mode_metaclip_400m", "expert_0", "clip_moe"),
    "CLIP-MoE, an expert": Row("clip_moe_sharegpt4v", "expert_1"),
    "CLIP-MoE, routers": Row("clip_moe_sharegpt4v", "clip_moe", "clip_moe"),
    "CLIP-FMoE, an expert": Row("clip_fmoe_sharegpt4v", "expert_1", "clip_fmoe", ONE_EXPERT),
    "CLIP-FMoE, routers": Row("clip_fmoe_sharegpt4v", "clip_fmoe", "clip_fmoe"),
}
DIMENSIONS = 768
Size = Literal["ViT-B/32", "ViT-B/16", "ViT-L/14", "ViE-B/16", "ViE-L/16", "ViE-H/14"]
Dtype, Presets = Literal["float32", "bfloat16"], Sequence[Literal[tuple(PRESETS)]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def block_ratios(
    size: str,
    images: int,
    num_experts: int,
    rounds: int,
    implementations: Sequence[str] = ("by_device",),
    modes: Sequence[str] = MODES,
    capacity_factor: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ffns: int = TOP_K,
    parts: int = 1,
) -> dict[tuple[str, str], tuple[float, float]]:
    """(implementation, mode) -> time of a whole sparse block, with its router and capacity, over as many dense FFNs as
    a token meets, on the same tokens, which a GPU computes compiled; and the block's FLOP/s. Medians of `rounds`
    training steps, and of five times as many forwards, which are short, after three of each.

    Args:
        size: the vision tower's.
        num_experts, ffns: experts, and those of a token, if they were as wide as an FFN.
        parts: into how many experts each of these is cut.
        capacity_factor: also of the forward. Of random tokens, C drops about 1 - C / K of the choices.
    """
    device, vision = torch.device(device), paper_config(size).vision_config
    config = CLIPMoEVisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_attention_heads=vision.num_attention_heads,
        num_experts=num_experts * parts,
        num_experts_per_tok=ffns * parts,
        moe_intermediate_size=vision.intermediate_size // parts,
        capacity_factor=capacity_factor,
        eval_capacity_factor=capacity_factor,
    )
    num_tokens = (vision.image_size // vision.patch_size) ** 2 + 1
    torch.manual_seed(0)
    hidden_states = torch.randn(images, num_tokens, config.hidden_size, device=device, dtype=dtype)
    config._experts_implementation = "by_device"
    block = CLIPMoESparseMoeBlock(config).to(device, dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    calls_at_a_time = QUEUED if device.type == "cuda" else 1

    def call(name: str, mode: str, dense: list[nn.Module]) -> float:
        inputs = hidden_states.clone().requires_grad_(mode != "forward")
        modules = dense if name == "dense" else [block]
        if name != "dense":
            config._experts_implementation = name

        def run() -> None:
            for _ in range(calls_at_a_time):
                with torch.set_grad_enabled(mode != "forward"):
                    output = sum(module(inputs) for module in modules)
                    if mode != "forward":
                        output.float().square().mean().backward()
                for module in modules:
                    module.zero_grad()

        return seconds(run, device) / calls_at_a_time

    ratios = {}
    forward = 4 * ffns * images * num_tokens * config.hidden_size * config.intermediate_size  # FLOP
    for mode in modes:
        # New ones in each mode: torch 2.11 computes no gradient of weights that were frozen when it compiled them
        dense = [CLIPMLP(config).to(device, dtype) for _ in range(ffns)]
        for module in (block, *dense):
            module.train(mode != "forward").requires_grad_(mode != "frozen")
        if device.type == "cuda":
            for module in dense:
                module.compile()
        calls = {name: partial(call, name, mode, dense) for name in ("dense", *implementations)}
        times = in_turn(calls, 5 * rounds if mode == "forward" else rounds, warm_up=3)
        flops = forward * {"forward": 1, "frozen": 2, "trained": 3}[mode]
        for name in implementations:
            ratios[name, mode] = median_ratio(times[name], times["dense"]), flops / statistics.median(times[name])
    return ratios


def block(
    *,
    output: Output = None,
    sizes: Sequence[Size] = ("ViT-B/16",),
    images: Sequence[int] = (8,),
    num_experts: Sequence[int] = (4, 8),
    implementations: Sequence[str] = ("by_device", "eager", "grouped", "grouped_mm"),
    capacity_factor: float | None = 2.0,
    dtype: Dtype = "float32",
    device: str = DEVICE,
    rounds: Rounds = 5,
    ffns: int = TOP_K,
    parts: Sequence[int] = (1,),
) -> str:
    """A whole sparse block over as many dense FFNs as a token meets, for each implementation of the experts.

    Args:
        num_experts: as wide as an FFN
        ffns: experts of a token that are as wide as an FFN
        parts: into how many experts each of these is cut
    """
    rows, options = [], {"capacity_factor": capacity_factor, "dtype": getattr(torch, dtype), "device": device}
    for size, number, experts, cut in itertools.product(sizes, images, num_experts, parts):
        ratios = block_ratios(size, number, experts, rounds, implementations, **options, ffns=ffns, parts=cut)
        for name in implementations:
            mode_ratios = [f"{ratios[name, mode][0]:.2f}" for mode in MODES]
            speed = tera(ratios[name, MODES[-1]][1], device)
            rows.append([size, dtype, number, experts * cut, ffns * cut, name, *mode_ratios, speed])
    return page(
        output,
        "# The sparse block",
        f"Time of a sparse block with its router and a capacity of {capacity_factor}, over that of {ffns} dense FFNs "
        f"on the same tokens{', compiled' * (torch.device(device).type == 'cuda')}: 1.00 is no overhead. Of the "
        "forward, of forward and backward with frozen experts (as where routers train), and with all weights trained. "
        f"Medians of {rounds} alternating runs after three (of a forward {5 * rounds}). {machine(device)}.",
        table(
            ["layer", "dtype", "images", "experts", "active per token", "implementation", *MODES, "TFLOP/s, trained"],
            rows,
        ),
    )


def vision_towers(dense: CLIPConfig, presets: Presets, device: str) -> dict[str, nn.Module]:
    """The vision tower of a dense CLIP and those of sparse ones, with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        sparse = {name: sparse_config(dense, PRESETS[name]) for name in presets}
        return {name: model_class(config)(config).vision_model for name, config in ({"dense": dense} | sparse).items()}


def towers(
    *,
    output: Output = None,
    size: Size = "ViT-B/16",
    images: int = 8,
    presets: Presets = ("clip_up", "clip_moe", "clip_fmoe"),
    dtype: Dtype = "float32",
    device: str = DEVICE,
    rounds: Rounds = 5,
) -> str:
    """Whole vision towers over the dense one, which a GPU computes compiled, as they are: forward, and training."""
    from clip_moe.training.loop import compile_layers

    dense = paper_config(size)
    models = vision_towers(dense, presets, device)
    if torch.device(device).type == "cuda":
        for model in models.values():
            compile_layers(model)
    edge = dense.vision_config.image_size
    pixels = torch.randn(images, 3, edge, edge, device=device)

    def call(name: str, trains: bool) -> float:
        def run() -> None:
            with (
                torch.set_grad_enabled(trains),
                torch.autocast(torch.device(device).type, torch.bfloat16, dtype != "float32"),
            ):
                loss = models[name](pixels).pooler_output.square().mean()
            if trains:
                loss.backward()
                models[name].zero_grad()

        return seconds(run, torch.device(device))

    times = {
        trains: in_turn({name: partial(call, name, trains) for name in models}, rounds, warm_up=1)
        for trains in (False, True)
    }
    configs = {"dense": dense, **{name: sparse_config(dense, PRESETS[name]) for name in presets}}
    adds = {name: count_multiply_adds(meta_model(config))["image"] for name, config in configs.items()}
    rows = []
    for name in presets:
        ratios = (median_ratio(times[trains][name], times[trains]["dense"]) for trains in (False, True))
        rows.append([name, f"{adds[name] / adds['dense']:.2f}", *(f"{ratio:.2f}" for ratio in ratios)])
    return page(
        output,
        f"# Vision towers, {size}",
        f"Over the dense tower, {images} images, {dtype}, medians of {rounds} alternating runs. {machine(device)}.",
        table(["", "multiply-adds", "forward", "forward and backward"], rows),
    )


def inference(
    *,
    output: Output = None,
    size: Size = "ViT-L/14",
    images: Sequence[int] = (1, 256),
    presets: Presets = ("clip_up", "clip_moe", "clip_fmoe"),
    dtype: Dtype = "bfloat16",
    device: str = DEVICE,
    rounds: Rounds = 5,
) -> str:
    """Images per second of vision towers: as they are, with compiled layers, and on a GPU also as a CUDA graph, which
    is launched as a whole."""
    from clip_moe.training.loop import compile_layers

    dense = paper_config(size)
    models = vision_towers(dense, presets, device)
    for model in models.values():
        model.to(getattr(torch, dtype)).eval()
    edge, rates = dense.vision_config.image_size, {}
    for compiled in (False, True):
        if compiled:
            for model in models.values():
                compile_layers(model)
        for number in images:
            pixels = torch.randn(number, 3, edge, edge, device=device, dtype=getattr(torch, dtype))
            calls = {}
            for name, model in models.items():
                calls["compiled" if compiled else "eager", name] = partial(embed, model, pixels)
                if compiled and torch.device(device).type == "cuda":
                    calls["CUDA graph", name] = as_graph(calls["compiled", name])
            calls = {key: partial(seconds, call, torch.device(device)) for key, call in calls.items()}
            for (way, name), times in in_turn(calls, rounds, warm_up=3).items():
                rates[number, name, way] = number / statistics.median(times)
    ways = list(dict.fromkeys(way for *_, way in rates))
    rows = [
        [number, name, *(f"{rates[number, name, way]:,.3g}" for way in ways)] for number in images for name in models
    ]
    return page(
        output,
        f"# Images per second, {size}",
        f"Of the vision towers alone, {dtype}, so many images at a time, medians of {rounds} alternating runs after "
        f"three. {machine(device)}.",
        table(["images", "tower", *ways], rows),
    )


@torch.no_grad()
def embed(tower: nn.Module, pixels: torch.Tensor) -> None:
    tower(pixels)


def as_graph(call: Callable[[], None]) -> Callable[[], None]:
    """A call as a CUDA graph: whatever it launches, once more, with the same tensors."""
    for _ in range(3):  # compiles and sets up libraries, which no graph can hold
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def tera(flops: float, device: str) -> str:
    """FLOP/s as TFLOP/s, and on a GPU of known peak the share of it."""
    peak = PEAKS.get(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    return f"{flops / 1e12:.3g}" + (f" ({flops / peak:.0%})" if peak else "")


def loss(pairs: int, chunk_size: int | None) -> Callable[[], None]:
    """Computes the loss of random embeddings, and its gradient."""
    torch.manual_seed(0)
    embeds = [F.normalize(torch.randn(pairs, DIMENSIONS), dim=1).requires_grad_() for _ in range(2)]
    return lambda: contrastive_loss(*embeds, torch.tensor(100.0), chunk_size).backward()


def step(pairs: int, mini_batch_size: int | None) -> Callable[[], object]:
    """Computes the gradient of a batch of random pairs by a small CLIP-UP."""
    from clip_moe.training.contrastive_task import ContrastiveTask
    from clip_moe.training.gradient_cache import cached_gradient
    from clip_moe.training.stages.train import TrainStage

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
    return lambda: float(cached_gradient(accelerator, task, batch, mini_batch_size, 1.0, True)[0])


def random_batch(model, pairs: int, tokens: int, captions: int) -> dict[str, torch.Tensor]:
    vision, text = model.config.vision_config, model.config.text_config
    ids = torch.randint(1, text.vocab_size - 2, (pairs * captions, tokens))
    ids[:, -1] = text.eos_token_id
    pixels = torch.randn(pairs, 3, vision.image_size, vision.image_size)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return batch | ({} if captions == 1 else {"caption_mask": torch.ones(pairs, captions, dtype=torch.bool)})


def parts_ratios(prepare: Callable, pairs: int, part: int, rounds: int) -> tuple[list[dict], list[dict], float, float]:
    """Costs of a computation as a whole and in parts in each round, and the ratios of memory and of time."""
    calls = {"whole": partial(cost, prepare, pairs, None), "parts": partial(cost, prepare, pairs, part)}
    costs = in_turn(calls, rounds)
    whole, parts = costs["whole"], costs["parts"]
    times = median_ratio(*([result["cpu"] for result in results] for results in (parts, whole)))
    return whole, parts, median_of(parts, "memory") / median_of(whole, "memory"), times


def training_step(
    model: PreTrainedModel, settings: "TrainStage", accelerator: Accelerator
) -> tuple[Callable[[dict[str, torch.Tensor]], None], "FirstFault"]:
    """A function that takes a step of the training loop on a batch, without log and checkpoints, and what of its losses
    and gradients was not finite."""
    from clip_moe.training import loop

    task = settings.task(model, SimpleNamespace())
    task, optimizer, scheduler = loop._prepare(accelerator, task, settings, 0, WARM_UP + TIMED)
    finite = loop.FirstFault(settings.name, Path("nowhere"))

    def step(batch: dict[str, torch.Tensor]) -> None:
        loop._compute_gradient(accelerator, task, iter([batch]), settings, 0, finite)
        loop._clip_gradient(accelerator, task, settings, 0, finite)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.unwrap_model(task).after_step(accelerator)

    return step, finite


def step_seconds(step: Callable, batches: Sequence[Any], device: torch.device) -> list[float]:
    """Seconds of each step. On a GPU all but the first are queued without waiting, as in training."""
    if device.type == "cpu":
        return [seconds(partial(step, batch), device) for batch in batches]
    times, marks = [seconds(partial(step, batches[0]), device)], []
    for batch in batches[1:]:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        step(batch)
    marks.append(torch.cuda.Event(enable_timing=True))
    marks[-1].record()
    wait_for(device)
    return times + [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(marks)]


def recipe_step(
    name: str,
    size: str,
    pairs: int,
    mini_batch_size: int | None = None,
    gradient_checkpointing: bool = True,
    dtype: Dtype = "float32",
    device: str = "cpu",
    compiled: bool = False,
) -> Callable[[], dict[str, Any]]:
    """Takes `WARM_UP` steps of a recipe, and times those that follow: `seconds` is their median, `first` those of the
    first, and `flops` what a step computes, its backward as twice its forward; None where weights are frozen or patches
    left out."""
    from clip_moe.engine.recipe import load_recipe
    from clip_moe.training.optimizers import set_trainable
    from lab import recipe_file

    row = RECIPES[name]
    stages = load_recipe(recipe_file(row.recipe)).stages
    settings = {
        "global_batch_size": pairs,
        "gradient_accumulation_steps": 1,
        "mini_batch_size": mini_batch_size,
        "gradient_checkpointing": gradient_checkpointing,
        "torch_compile": compiled,
    }
    (stage,) = (replace(stage, **settings) for stage in stages if stage.name == row.stage)
    (tokens,) = [stage.length for stage in stages if stage.stage == "long_context"] or [77]
    device, captions = torch.device(device), len(stage.caption_weights or [1])
    config = paper_config(size)
    tokens = row.tokens or tokens
    config.text_config.max_position_embeddings = tokens
    if row.preset is not None:
        config = sparse_config(config, replace(PRESETS[row.preset], **row.changes))

    def take() -> dict[str, float]:
        torch.manual_seed(0)
        with torch.device(device):
            model = (CLIPModel if row.preset is None else CLIPMoEModel)(config).train()
        sizes = [model.get_parameter(name).numel() for name in set_trainable(model, stage.trainable)]
        mixed = "no" if dtype == "float32" else "bf16"
        take_step, finite = training_step(model, stage, Accelerator(cpu=device.type == "cpu", mixed_precision=mixed))
        batches = [random_batch(model, pairs, tokens, captions) for _ in range(WARM_UP + TIMED)]
        if device.type == "cuda":
            batches = [{key: value.pin_memory() for key, value in batch.items()} for batch in batches]
        times = step_seconds(take_step, batches, device)
        finite.require()
        total = sum(parameter.numel() for parameter in model.parameters())
        is_counted = sum(sizes) == total
        adds = count_multiply_adds(meta_model(config))
        return {
            "parameters": total,
            "trainable": sum(sizes),
            "seconds": statistics.median(times[WARM_UP:]),
            "first": times[0],
            "flops": 6 * pairs * (adds["image"] + captions * adds["text"]) if is_counted else None,
        }

    return take


def recipes(
    *,
    output: Output = None,
    size: Size = "ViT-B/16",
    batch: int = 8,
    recipes: Sequence[Literal[*RECIPES]] = tuple(RECIPES),
    mini_batch_size: int | None = None,
    gradient_checkpointing: bool = True,
    dtype: Dtype = "float32",
    device: str = DEVICE,
    compiled: bool = torch.cuda.is_available(),
) -> str:
    """An optimizer step of each paper's recipe, with random weights, images and captions.

    Args:
        batch: pairs of the step
        mini_batch_size: pairs that are embedded at a time (default: all)
        dtype: by autocast
        compiled: whether the layers are
    """
    rows, dense = [], None

    def written() -> str:
        at_a_time = f", {mini_batch_size} at a time" if mini_batch_size else ""
        columns = ["recipe", "parameters", "trainable", "pairs/s", "time over dense", "TFLOP/s", "first step"]
        return page(
            output,
            f"# One step of each recipe, {size}",
            f"{batch} pairs{at_a_time}, {dtype}, gradient checkpointing {'on' if gradient_checkpointing else 'off'}, "
            f"{'compiled' if compiled else 'eager'}. Medians of {TIMED} steps after {WARM_UP}. {machine(device)}.",
            table([*columns, "memory"], rows),
        )

    for name in recipes:
        options = batch, mini_batch_size, gradient_checkpointing, dtype, device, compiled
        try:
            row = cost(recipe_step, name, size, *options)
        except Exception as error:  # of one row: too little memory ends a process or raises
            rows.append([name, f"failed: {error}", *[""] * 7])
            written()
            continue
        step, memory = row["result"], row["memory"]
        cells = [f"{step[key] / 1e6:,.0f} M" for key in ("parameters", "trainable")]
        dense = step["seconds"] if name == "dense, all weights" else dense
        cells += [f"{batch / step['seconds']:.3g}", f"{step['seconds'] / dense:.2f}" if dense else ""]
        cells += [step["flops"] and tera(step["flops"] / step["seconds"], device), f"{step['first']:.0f} s"]
        rows.append([name, *cells, f"{memory / 2**30:.2f} GiB"])
        written()
    return written()


if __name__ == "__main__":
    run_program(
        "python -m lab.speed.steps",
        __doc__,
        {"block": block, "towers": towers, "inference": inference, "recipes": recipes},
    )
