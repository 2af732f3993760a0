"""The commands of this room: `clip-moe report` and `efficiency`."""

from pathlib import Path
from typing import Literal

from clip_moe.engine.command_line import Folder, command


@command
def report(results: list[Path], /, *, output_dir: Folder, baseline: str | None = None) -> str:
    """Results side by side: tables as markdown and as one HTML page, and a chart.

    An `evaluate` stage writes these of its own models; here they may come from several.

        clip-moe evaluate scores --models.bundled training/symbol_clip --tasks symbols_pairs
        clip-moe report scores/*.json --output_dir scores/page

    Args:
        results: JSON files that evaluate wrote
        output_dir: gets report.md, report.html and report.svg
        baseline: model to compare the others with
    """
    from clip_moe.engine.provenance import MANIFEST
    from clip_moe.evaluation.report import write_report

    return write_report([path for path in results if path.name != MANIFEST], output_dir, baseline)


@command
def efficiency(
    models: list[str],
    /,
    *,
    baseline: str | None = None,
    output_dir: Folder | None = None,
    batch_size: int = 32,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str | None = None,
) -> str:
    """The costs of models, dense beside sparse: parameters, multiply-adds and speed.

    Parameters and multiply-adds are counted without computing anything. Where there are weights, speed is measured,
    too: in rounds, in each of which all models have their turn. In brackets: the ratio to the first model, or to
    --baseline.

        clip-moe efficiency training/symbol_clip training/name_clip_moe

    The papers' tables: CLIP-UP's 2, CLIP-MoE's section 5.4, CLIP-FMoE's 5.

        clip-moe efficiency ViT-B/32 ViT-B/32:clip_up ViT-B/16 ViT-B/16:clip_up ViT-L/14 ViT-L/14:clip_up
        clip-moe efficiency ViT-B/32 ViT-B/32:dense_price
        clip-moe efficiency ViT-L/14 ViT-L/14:clip_moe
        clip-moe efficiency ViT-L/14 ViT-L/14:5_experts ViT-L/14:clip_fmoe

    Args:
        models: folders or hub names, or architectures at a paper's size: ViT-B/32, ViT-B/16, ViT-L/14, SigLIP2-B/16,
            SigLIP2-L/16, SigLIP2-So400m/14 or MetaCLIP2-H/14, alone or with a preset, such as :dense_price,
            or :5_experts, which is CLIP-FMoE's baseline
        baseline: the model of the ratios (default: the first)
        output_dir: gets efficiency.md and efficiency.json
        batch_size: images or texts at a time
        dtype: precision of the computation
        device: default: the accelerator, if there is one
    """
    import torch

    from clip_moe.conversion.checkpoints import has_file
    from clip_moe.engine.files import refuse_to_overwrite
    from clip_moe.engine.messages import did_you_mean
    from clip_moe.engine.provenance import device_name, environment, weights_fingerprint
    from clip_moe.evaluation.costs import paper_config
    from clip_moe.evaluation.efficiency import WEIGHT_FILES, count_costs, efficiency_page
    from clip_moe.evaluation.embedder import usable_device
    from clip_moe.evaluation.page import write_page
    from clip_moe.evaluation.speed import measure_speed

    baseline = models[0] if baseline is None else baseline
    if baseline not in models:
        raise ValueError(f"the baseline {baseline!r} is not one of the models{did_you_mean(baseline, models)}")
    if output_dir is not None:
        refuse_to_overwrite(output_dir / "efficiency.json")
    used_device = usable_device(device)
    costs = {name: count_costs(name) for name in models}
    settings = {
        "baseline": baseline,
        "weights": {name: None if paper_config(name) else weights_fingerprint(name) for name in models},
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device_name(used_device),
        "threads": torch.get_num_threads(),
    }
    with_weights = [name for name in models if not paper_config(name) and has_file(name, WEIGHT_FILES)]
    measured = measure_speed(with_weights, batch_size, used_device, getattr(torch, dtype))
    for name, speed in measured.items():
        costs[name]["measured"] = speed
    settings |= environment()
    page = efficiency_page(costs, baseline, settings)
    if output_dir is not None:
        write_page(output_dir / "efficiency", page, data={**settings, "models": costs})
    return page
