"""The commands of this room: `clip-moe embed`, `report` and `efficiency`."""

from pathlib import Path
from typing import Literal

from records.command_line import Folder, command

Dtype = Literal["float32", "bfloat16", "float16"]


@command
def embed(
    *,
    model: str,
    dataset: str,
    output_dir: Folder,
    what: Literal["both", "images", "captions"] = "both",
    form: Literal["npy", "parquet"] = "npy",
    split: str = "train",
    num_samples: int | None = None,
    image_column: str = "image",
    image_root: str | None = None,
    caption_column: str = "caption",
    batch_size: int = 64,
    dtype: Dtype = "float32",
    device: str | None = None,
    num_workers: int | None = None,
) -> str:
    """Write a model's embeddings of your pictures and captions, normalized and in the order of the data.

    An interrupted command goes on where it stopped when it is run again with the same options. The second line shares
    the work among several processes:

        clip-moe embed --model runs/clip_moe_demo/clip_moe --dataset my/dataset --output-dir embeddings
        accelerate launch -m clip_moe embed --model FOLDER ...

    OUTPUT_DIR gets image_embeds.npy and text_embeds.npy, and rows.jsonl, which says of each pair where it is in the
    data, its picture and its captions; or all of that as embeds.parquet. Pictures that cannot be read are left out,
    counted and named.

    Args:
        model: folder or hub name of a CLIPModel or CLIPMoEModel
        dataset: whatever a recipe's data.source may be
        output_dir: folder of these embeddings alone
        what: what to embed
        form: form of the files
        split: split of the data set; a folder without splits is `train`
        num_samples: the first ones (default: all)
        image_column: images or their paths
        image_root: what relative paths of images start from
        caption_column: texts or lists of texts
        batch_size: images or texts at a time
        dtype: of the computation; files are in float32
        device: default: the accelerator, if there is one
        num_workers: processes that read images (default: none for a few small ones, else up to 8)
    """
    import torch

    from data.sources import DataArguments
    from evaluation.embed import embed_pairs
    from records.processes import joined_processes

    arguments = DataArguments(
        source=dataset,
        split=split,
        num_samples=num_samples,
        image_column=image_column,
        image_root=image_root,
        caption_column=caption_column,
    )
    options = {"dtype": getattr(torch, dtype), "num_workers": num_workers, "state": joined_processes(device)}
    held = embed_pairs(model, arguments, output_dir, what, form, batch_size, device, **options)
    counts = f"{held.get('num_images', 0)} pictures and {held.get('num_captions', 0)} captions"
    return f"{output_dir}: {counts}, {len(held.get('unreadable', []))} pictures skipped"


@command
def report(results: list[Path], /, *, output_dir: Folder, baseline: str | None = None) -> str:
    """Results side by side: tables as markdown and as one HTML page, and a chart.

        clip-moe report scores/*.json --output-dir scores

    Args:
        results: JSON files that evaluate wrote
        output_dir: gets report.md, report.html and report.svg
        baseline: model to compare the others with
    """
    from evaluation.report import write_report

    return write_report(results, output_dir, baseline)


@command
def efficiency(
    models: list[str],
    /,
    *,
    baseline: str | None = None,
    captions: int | None = None,
    output_dir: Folder | None = None,
    batch_size: int = 32,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> str:
    """What models cost, dense beside sparse: parameters, multiply-adds, speed and memory.

    Parameters and multiply-adds are counted without computing anything. Where there are weights, speed and memory are
    measured, too: in rounds, in each of which all models have their turn. In brackets: the ratio to the first model, or
    to --baseline.

        clip-moe efficiency training/symbol_clip runs/clip_moe_demo/clip_moe --output-dir runs/efficiency
        clip-moe efficiency ViT-L/14 ViT-L/14:5_experts ViT-L/14:clip_fmoe

    The papers' tables:

        CLIP-UP, Table 2         ViT-B/32 ViT-B/32:clip_up ViT-B/16 ViT-B/16:clip_up ViT-L/14 ViT-L/14:clip_up
        CLIP-MoE, section 5.4    ViT-L/14 ViT-L/14:clip_moe
        CLIP-FMoE, Table 5       ViT-L/14 ViT-L/14:5_experts ViT-L/14:clip_fmoe

    Args:
        models: folders or hub names, or architectures at a paper's size: ViT-B/32, ViT-B/16, ViT-L/14, SigLIP2-B/16,
            SigLIP2-L/16, SigLIP2-So400m/14 or MetaCLIP2-H/14, alone or with :clip_up, :clip_moe, :clip_fmoe, or
            :5_experts, which is CLIP-FMoE's baseline
        baseline: the model of the ratios (default: the first)
        captions: different captions that there are to remember: the page tells whether that is much for the models
        output_dir: gets efficiency.md and efficiency.json
        batch_size: images or texts at a time
        dtype: of the computation
        device: default: the accelerator, if there is one
    """
    import torch

    from evaluation.efficiency import compare_models

    return compare_models(
        models,
        baseline=baseline,
        captions=captions,
        output_dir=output_dir,
        batch_size=batch_size,
        dtype=getattr(torch, dtype),
        device=device,
    )
