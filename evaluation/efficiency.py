"""What models cost, dense beside sparse: parameters, multiply-adds, speed and memory.

    python -m evaluation.efficiency training/symbol_clip runs/demo/clip_moe --output-dir runs/efficiency
    python -m evaluation.efficiency ViT-L/14 ViT-L/14:5_experts ViT-L/14:clip_fmoe

MODEL is a folder or hub name, or an architecture at a paper's size: ViT-B/32, ViT-B/16 or ViT-L/14, alone or with
:clip_up, :clip_moe, :clip_fmoe, or :5_experts, which is CLIP-FMoE's baseline. Parameters and multiply-adds are counted
without computing anything. Where there are weights, speed and memory are measured, too: in rounds, in each of which all
models have their turn. In brackets: the ratio to the first model, or to --baseline. The papers' tables:

    CLIP-UP, Table 2         ViT-B/32 ViT-B/32:clip_up ViT-B/16 ViT-B/16:clip_up ViT-L/14 ViT-L/14:clip_up
    CLIP-MoE, section 5.4    ViT-L/14 ViT-L/14:clip_moe
    CLIP-FMoE, Table 5       ViT-L/14 ViT-L/14:5_experts ViT-L/14:clip_fmoe
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from conversion.files import one_line_errors
from conversion.folders import has_file, load_config, loading
from conversion.markdown import escape
from conversion.messages import did_you_mean
from conversion.presets import PRESETS
from conversion.provenance import environment, weights_fingerprint
from conversion.upcycle import sparse_config
from evaluation.embedder import usable_device
from evaluation.page_folder import require_free_page, write_page
from evaluation.report import markdown_table
from evaluation.results import named_folder
from evaluation.speed import ROUNDS, measure_memory, measure_speed
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel

# OpenAI's, at 224 pixels and 77 tokens: width, layers, heads and patch size of the vision tower; width, layers and
# heads of the text tower; size of the embeddings
SIZES = {
    "ViT-B/32": (768, 12, 12, 32, 512, 12, 8, 512),
    "ViT-B/16": (768, 12, 12, 16, 512, 12, 8, 512),
    "ViT-L/14": (1024, 24, 16, 14, 768, 12, 12, 768),
}
# "Up-Cycling" in CLIP-FMoE's tables
FIVE_EXPERTS = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=5, num_experts_per_tok=3, fusion_gate=False)
ARCHITECTURES = {**PRESETS, "5_experts": FIVE_EXPERTS}
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def paper_config(name: str) -> CLIPConfig | CLIPMoEConfig | None:
    """The configuration at a paper's size that a name such as ViT-L/14:clip_moe stands for; None for other names.

    Raises:
        ValueError: there is no such architecture.
    """
    size, colon, architecture = name.partition(":")
    if size not in SIZES:
        return None
    dense = _dense_config(*SIZES[size])
    if not colon:
        return dense
    if architecture not in ARCHITECTURES:
        hint = did_you_mean(architecture, ARCHITECTURES)
        raise ValueError(f"{name}: there is no architecture {architecture!r}{hint}, only {', '.join(ARCHITECTURES)}")
    return sparse_config(dense, ARCHITECTURES[architecture])


def _dense_config(vision, vision_layers, vision_heads, patch, text, text_layers, text_heads, projection) -> CLIPConfig:
    def tower(width: int, layers: int, heads: int) -> dict[str, int]:
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "projection_dim": projection,
        }

    return CLIPConfig(
        text_config=tower(text, text_layers, text_heads),
        vision_config=tower(vision, vision_layers, vision_heads) | {"patch_size": patch, "image_size": 224},
        projection_dim=projection,
    )


def meta_model(config: CLIPConfig | CLIPMoEConfig) -> PreTrainedModel:
    """A dense or sparse CLIP without storage, whose every matrix product can be counted."""
    with torch.device("meta"):
        if isinstance(config, CLIPConfig):
            return CLIPModel._from_config(config, attn_implementation="eager").eval()
        # One product for each token and chosen expert, so that counts do not depend on the data
        return CLIPMoEModel._from_config(
            config, attn_implementation="eager", experts_implementation="batched_mm"
        ).eval()


def count_parameters(model: PreTrainedModel, trainable: str | None = None) -> dict[str, int]:
    """Numbers of parameters.

    Args:
        trainable: a regular expression, see `training.freezing.set_trainable`.

    Returns:
        `total`; `activated`, those that one token meets: K of the E experts of each sparse layer; both also of each
        tower with its projection (`text`, `text_activated`, `vision`, `vision_activated`), of which a shared encoder is
        a part in both; those of one expert in all layers (`expert`, 0 if dense), and of all `routers` and fusion gates;
        and with `trainable` the number of those
        whose names it is found in, under that name.
    """
    named = list(model.named_parameters(remove_duplicate=False))  # a shared encoder is a part of both towers

    def of(pattern: str) -> int:
        return sum(parameter.numel() for parameter in {p for name, p in named if re.search(pattern, name)})

    counts = {"total": of(""), "activated": of(""), "expert": 0}
    shared, idle_of_tower = getattr(model.config, "shared_encoder", False), {}
    for tower, prefixes in (("text", "text_(model|projection)"), ("vision", "(vision_model|visual_projection)")):
        config = getattr(model.config, f"{tower}_config")
        experts = of(rf"^{tower}_model\..*\.experts\.")
        idle = experts * (config.num_experts - config.num_experts_per_tok) // config.num_experts if experts else 0
        counts[tower] = of(rf"^{prefixes}\.")
        counts[f"{tower}_activated"] = counts[tower] - idle
        idle_of_tower[tower] = idle
        if not (shared and tower == "vision"):  # counted already
            counts["expert"] += experts // config.num_experts if experts else 0
    # Of a shared encoder, what the tokens of neither tower meet
    counts["activated"] -= min(idle_of_tower.values()) if shared else sum(idle_of_tower.values())
    counts["routers"] = of(r"\.(router|fusion_gate)\.")
    if trainable is not None:
        counts["trainable"] = of(trainable)
    return counts


def count_multiply_adds(model: nn.Module) -> dict[str, int]:
    """Multiply-adds of the forward pass of one image and one text of full length, as torch counts them.

    Args:
        model: of `meta_model`.

    Returns:
        Of a tower with its projection, `image` and `text`; and `attention_scores`, the part of both that multiplies
        queries with keys and the result with values. A FLOP count is twice the sum of `image` and `text`.
    """
    text, vision = model.config.text_config, model.config.vision_config
    pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size, device="meta")
    tokens = torch.zeros(1, text.max_position_embeddings, dtype=torch.long, device="meta")
    image, image_scores = _multiply_adds(lambda: model.get_image_features(pixel_values=pixels))
    caption, caption_scores = _multiply_adds(lambda: model.get_text_features(input_ids=tokens))
    return {"image": image, "text": caption, "attention_scores": image_scores + caption_scores}


def _multiply_adds(forward: Callable[[], Any]) -> tuple[int, int]:
    """All of them, and those of attention scores."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        forward()
    counts = counter.get_flop_counts()
    scores = sum(
        flops
        for module, operations in counts.items()
        if module.endswith(".self_attn")
        for operation, flops in operations.items()
        if operation == torch.ops.aten.bmm
    )
    return sum(counts["Global"].values()) // 2, scores // 2


def compare_models(
    models: Sequence[str],
    *,
    baseline: str | None = None,
    output_dir: Path | None = None,
    batch_size: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> str:
    """Count and measure what models cost.

    Args:
        models: folders, hub names, or architectures at a paper's size (`paper_config`).
        baseline: the model of the ratios; default: the first.
        output_dir: gets `efficiency.md` and `efficiency.json`.
        batch_size: images or texts that are embedded at a time.
        device: default: the accelerator, if there is one.

    Returns:
        The page: a table of what was counted, and one of what was measured, of models with weights.

    Raises:
        OSError: there is no such model, or the folder cannot be written.
        ValueError: no or equal models, a baseline that is none of them, a batch size below 1, a model that is no CLIP
            or damaged, a device that cannot compute, too little memory, or a folder with a page of other models,
            weights or settings.
    """
    repeated = sorted({model for model in models if list(models).count(model) > 1})
    if repeated or not models:
        raise ValueError(f"models must be different ones, but {', '.join(repeated) or 'none'} is given")
    baseline = models[0] if baseline is None else baseline
    if baseline not in models:
        raise ValueError(f"the baseline {baseline!r} is none of the models{did_you_mean(baseline, models)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    device = usable_device(device)
    costs = {name: _counts(name) for name in models}
    settings = {
        "baseline": baseline,
        "weights": {name: None if paper_config(name) else weights_fingerprint(name) for name in models},
        "batch_size": batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
    }
    if output_dir is not None:
        require_free_page(output_dir, "efficiency", settings)
    with_weights = [name for name in models if paper_config(name) is None and has_file(name, *WEIGHT_FILES)]
    for name in with_weights:  # before all of them are in memory
        costs[name]["measured"] = measure_memory(name, batch_size, device, dtype)
    for name, speed in measure_speed(with_weights, batch_size, device, dtype).items():
        costs[name]["measured"] |= speed
    made_with = environment()
    page = _page(costs, baseline, settings | made_with)
    if output_dir is not None:
        write_page(output_dir, "efficiency", page, {"models": costs, **made_with}, settings)
    return page


def _counts(name: str) -> dict[str, dict[str, float]]:
    config = paper_config(name) or load_config(name)
    if not isinstance(config, CLIPConfig | CLIPMoEConfig):
        raise ValueError(f"{name} is a model of type {config.model_type!r}: a dense or sparse CLIP is needed")
    with loading(name):
        model = meta_model(config)
        return {"parameters": count_parameters(model), "multiply_adds": count_multiply_adds(model)}


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


# Column -> what is in it, of the costs of a model
COUNTED = {
    "M parameters": lambda costs: costs["parameters"]["total"] / 1e6,
    "activated": lambda costs: costs["parameters"]["activated"] / 1e6,
    "text": lambda costs: costs["parameters"]["text"] / 1e6,
    "activated, text": lambda costs: costs["parameters"]["text_activated"] / 1e6,
    "vision": lambda costs: costs["parameters"]["vision"] / 1e6,
    "activated, vision": lambda costs: costs["parameters"]["vision_activated"] / 1e6,
    "one expert": lambda costs: costs["parameters"]["expert"] / 1e6,
    "routers, gates": lambda costs: costs["parameters"]["routers"] / 1e6,
}
MULTIPLY_ADDS = {
    "G multiply-adds of an image": lambda costs: costs["multiply_adds"]["image"] / 1e9,
    "of a text": lambda costs: costs["multiply_adds"]["text"] / 1e9,
    "of both": lambda costs: _both(costs) / 1e9,
    "without attention scores": lambda costs: (_both(costs) - costs["multiply_adds"]["attention_scores"]) / 1e9,
    "GFLOPs of both": lambda costs: 2 * _both(costs) / 1e9,
}
MEASURED = {
    "images/s": lambda costs: costs["measured"]["images_per_second"],
    "captions/s": lambda costs: costs["measured"]["texts_per_second"],
    "peak MiB": lambda costs: costs["measured"]["peak_memory"] / 2**20,
    "peak MiB above start": lambda costs: _own_memory(**costs["measured"]) / 2**20,
}


def _both(costs: Mapping[str, Any]) -> int:
    return costs["multiply_adds"]["image"] + costs["multiply_adds"]["text"]


def _own_memory(peak_memory: int, memory_before: int = 0, **_: float) -> int:
    """What the model and its batch take."""
    return peak_memory - memory_before


def _page(costs: Mapping[str, Any], baseline: str, how: Mapping[str, Any]) -> str:
    measured = {name: of_model for name, of_model in costs.items() if "measured" in of_model}
    sections = ["# Efficiency", _table(costs, COUNTED, baseline), _table(costs, MULTIPLY_ADDS, baseline)]
    sections.append(
        "Activated: what one token meets. Multiply-adds: of one image and one text of full length, by torch's counter; "
        f"a FLOP count is twice as much. In brackets: times {escape(baseline)}."
    )
    if measured:
        memory = "the process, which starts with its libraries," if how["device"] == "cpu" else "the accelerator"
        sections += [
            _table(measured, MEASURED, baseline),
            f"Medians of {ROUNDS} rounds, in each of which all models have their turn, after one that warms up. Random "
            f"images and texts of full length, {how['batch_size']} at a time, {how['dtype']}; without reading, "
            f"decoding and tokenizing. Memory: of {memory} for one model alone.",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in how["versions"].items())
    sections.append(f"{how['device']}, {how['threads']} threads, commit {how['commit']}, {versions}.")
    return "\n\n".join(sections)


def _table(costs: Mapping[str, Any], columns: Mapping[str, Callable], baseline: str) -> str:
    rows = []
    for name, of_model in costs.items():
        cells = []
        for value_of in columns.values():
            value, of_baseline = value_of(of_model), value_of(costs[baseline]) if baseline in costs else 0
            cells.append(_number(value) + (f" ({value / of_baseline:.2f})" if of_baseline and name != baseline else ""))
        rows.append([name, *cells])
    return markdown_table(["model", *columns], rows)


def _number(value: float) -> str:
    """With three digits after the point where it is small; nothing for none."""
    return (
        "" if value == 0 else f"{value:,.0f}" if value >= 10_000 else f"{value:.3f}" if value < 10 else f"{value:.2f}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.efficiency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, hub name, or as above")
    parser.add_argument("--baseline", help="the model of the ratios (default: the first)")
    parser.add_argument("--output-dir", type=named_folder, help="gets efficiency.md and efficiency.json")
    parser.add_argument("--batch-size", type=int, default=32, help="images or texts at a time (default: 32)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", help="default: the accelerator, if there is one")
    args = parser.parse_args(argv)
    with one_line_errors():
        page = compare_models(
            args.models,
            baseline=args.baseline,
            output_dir=args.output_dir,
            batch_size=args.batch_size,
            dtype=getattr(torch, args.dtype),
            device=args.device,
        )
    print(page)


if __name__ == "__main__":
    main()
