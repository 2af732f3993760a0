"""The commands of this room: `clip-moe evaluate`, `embed`, `experts`, `report` and `efficiency`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from evaluation.own_columns import OwnColumns
from records.command_line import Folder, command
from records.yaml_files import read_yaml

Dtype = Literal["float32", "bfloat16", "float16"]


@Parameter(name="*")
@dataclass(kw_only=True)
class Data(OwnColumns):
    """What tasks are measured on.

    Args:
        data_root: folder with copies of benchmarks, DATA_ROOT/NAME; those that are not there come from the Hub
        test_seed: of the pictures of tasks on built-in worlds
    """

    data_root: str | None = None
    test_seed: int = 0

    def wanted(self, tasks: list[str]):
        """The tasks of these names, between commas or spaces."""
        from evaluation.tasks import parse_tasks, wanted_tasks

        columns = {column.name: getattr(self, column.name) for column in fields(OwnColumns)}
        return wanted_tasks(parse_tasks(" ".join(tasks)), columns)


@command
def evaluate(
    *,
    model: str,
    tasks: list[str],
    output_dir: Folder,
    name: str | None = None,
    batch_size: int = 64,
    dtype: Dtype = "float32",
    change: list[str] | None = None,
    device: str | None = None,
    num_workers: int | None = None,
    data: Data | None = None,
) -> str:
    """Measure a model.

    Embeddings are computed once for every model and dataset and kept in OUTPUT_DIR/embeddings. A command that was
    interrupted goes on where it stopped. Several processes share the work, as in the last line:

        clip-moe evaluate --model runs/clip_moe_demo/clip_moe --tasks symbols_zero_shot --output-dir scores
        clip-moe evaluate --model FOLDER --tasks clip_moe_table_5 --data-root DATA --output-dir scores
        clip-moe evaluate --model FOLDER --tasks retrieval --dataset my/dataset --split test --output-dir scores
        accelerate launch -m clip_moe evaluate --model FOLDER ...

    Args:
        model: folder or hub name of a CLIPModel, CLIPMoEModel or CLIPMoDEModel
        tasks: names of tasks on built-in worlds, of benchmarks and of papers' tables, which
            `python -m evaluation.benchmarks` prints; with --dataset: zero_shot, linear_probe, retrieval, pairs
        output_dir: gets a JSON file a task
        name: what reports call the model (default: its folder's name)
        batch_size: images or texts at a time
        dtype: of the computation
        change: NAME=VALUE of a mixture, in place of its own configuration: routing, routing_temperature,
            nearest_center_only, feature_ensemble
        device: default: the accelerator, if there is one
        num_workers: that read images (default: none for a few small ones, else up to 8)
    """
    changes = dict(map(_change, change or []))
    import torch

    from evaluation.ensemble import is_mixture
    from evaluation.evaluate import evaluate_model
    from evaluation.tasks import find_tasks
    from records.processes import joined_processes

    data = data or Data()
    state = joined_processes(device)
    wanted = data.wanted(tasks)
    is_mixture(model)  # raises before any data are read
    results = evaluate_model(
        model,
        find_tasks(wanted, data.data_root, num_workers, data.test_seed),
        output_dir,
        name=name,
        batch_size=batch_size,
        device=device if state is None else state.device,
        dtype=getattr(torch, dtype),
        changes=changes,
        num_workers=num_workers,
        state=state,
    )
    lines = []
    for result in results:
        numbers = ", ".join(f"{metric} {value:.1%}" for metric, value in result["metrics"].items())
        lines.append(f"{result['task']} ({result['num_samples']} samples, {result['num_skipped']} skipped): {numbers}")
    return "\n".join(lines)


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


def _change(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--change: {text!r} is no NAME=VALUE")
    return name, read_yaml(value, name)


@command
def experts(
    *,
    model: str,
    tasks: list[str],
    output_dir: Folder,
    num_experts_per_tok: list[int] = (),
    text_layer: int | None = None,
    vision_layer: int | None = None,
    expert: int | None = None,
    capacity_factors: list[float] = (),
    batch_size: int = 64,
    device: str | None = None,
    data: Data | None = None,
) -> str:
    """What each expert of a sparse model knows, and which tokens it gets: OUTPUT_DIR/experts.md, with pictures.

        clip-moe experts --model runs/clip_moe_demo/clip_moe --tasks symbols_pairs --output-dir experts

    Do the experts do anything? First comes the collapse test: every task is measured with the routers, and with every
    layer's experts replaced by their mean; if that costs nothing, the experts do nothing apart from each other. Beside
    it stand the entropy of the routers, in bits, and how alike the experts are.

    Then every task is measured with all tokens sent through one expert, for every expert (CLIP-MoE Table 1, CLIP-FMoE
    Tables 4 and 17), also with other numbers of experts a token (CLIP-FMoE Tables 18 and 19). An expert alone has the
    weight that the experts of a token have together in the routed model. Where the weights do not sum to 1,
    experts.json also has the scales that `clip-moe convert dense --scale` takes.

    Args:
        model: folder or hub name of a CLIPMoEModel
        tasks: as of evaluate
        output_dir: gets experts.md, experts.json and the pictures
        num_experts_per_tok: other numbers of experts a token
        text_layer: whose words are drawn (default: the last sparse one)
        vision_layer: whose patches are drawn (default: the last sparse one)
        expert: draw this one large, too
        capacity_factors: draw the patches that they drop (default: that of the vision tower in training and twice
            that)
        batch_size: images or texts at a time
        device: default: the accelerator, if there is one
    """
    from evaluation.experts import analyze_experts
    from evaluation.tasks import find_tasks

    data = data or Data()
    layers = {"text": text_layer, "vision": vision_layer}
    return analyze_experts(
        model,
        find_tasks(data.wanted(tasks), data.data_root, seed=data.test_seed),
        output_dir,
        num_experts_per_tok=num_experts_per_tok,
        layers={tower: layer for tower, layer in layers.items() if layer is not None},
        capacity_factors=capacity_factors,
        expert=expert,
        batch_size=batch_size,
        device=device,
    )


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
