"""The commands of this room: `clip-moe report` and `efficiency`."""

from pathlib import Path
from typing import Literal

from clip_moe.engine.command_line import Folder, command

Dtype = Literal["float32", "bfloat16", "float16"]


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
    from clip_moe.evaluation.report import write_report

    return write_report(results, output_dir, baseline)


@command
def efficiency(
    models: list[str],
    /,
    *,
    baseline: str | None = None,
    output_dir: Folder | None = None,
    batch_size: int = 32,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> str:
    """The costs of models, dense beside sparse: parameters, multiply-adds and speed.

    Parameters and multiply-adds are counted without computing anything. Where there are weights, speed is measured,
    too: in rounds, in each of which all models have their turn. In brackets: the ratio to the first model, or to
    --baseline.

        clip-moe efficiency training/symbol_clip training/name_clip_moe

    The papers' tables: CLIP-UP's 2, CLIP-MoE's section 5.4, CLIP-FMoE's 5.

        clip-moe efficiency ViT-B/32 ViT-B/32:clip_up ViT-B/16 ViT-B/16:clip_up ViT-L/14 ViT-L/14:clip_up
        clip-moe efficiency ViT-L/14 ViT-L/14:clip_moe
        clip-moe efficiency ViT-L/14 ViT-L/14:5_experts ViT-L/14:clip_fmoe

    Args:
        models: folders or hub names, or architectures at a paper's size: ViT-B/32, ViT-B/16, ViT-L/14, SigLIP2-B/16,
            SigLIP2-L/16, SigLIP2-So400m/14 or MetaCLIP2-H/14, alone or with :clip_up, :clip_moe, :clip_fmoe, or
            :5_experts, which is CLIP-FMoE's baseline
        baseline: the model of the ratios (default: the first)
        output_dir: gets efficiency.md and efficiency.json
        batch_size: images or texts at a time
        dtype: precision of the computation
        device: default: the accelerator, if there is one
    """
    import torch

    from clip_moe.evaluation.efficiency import compare_models

    return compare_models(
        models,
        baseline=baseline,
        output_dir=output_dir,
        batch_size=batch_size,
        dtype=getattr(torch, dtype),
        device=device,
    )
