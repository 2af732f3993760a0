"""The costs of models, dense beside sparse: parameters, multiply-adds and speed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from clip_moe.conversion.checkpoints import clip_class, config_of, has_file, loading
from clip_moe.conversion.processors import most_patches
from clip_moe.engine.files import refuse_to_overwrite
from clip_moe.engine.markdown import escape, markdown_table
from clip_moe.engine.messages import did_you_mean
from clip_moe.engine.provenance import device_name, environment, weights_fingerprint
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model, paper_config
from clip_moe.evaluation.embedder import usable_device
from clip_moe.evaluation.page import write_page
from clip_moe.evaluation.speed import ROUNDS, measure_speed

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def compare_models(
    models: Sequence[str],
    *,
    baseline: str | None = None,
    output_dir: Path | None = None,
    batch_size: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> str:
    """Count and measure what models cost. For the arguments, see `evaluation.commands.efficiency`.

    Returns:
        The page: a table of what was counted, and one of what was measured, of models with weights.

    Raises:
        ValueError: a baseline that is none of the models, a model that is no CLIP, or a folder with a page.
    """
    baseline = models[0] if baseline is None else baseline
    if baseline not in models:
        raise ValueError(f"the baseline {baseline!r} is none of the models{did_you_mean(baseline, models)}")
    device = usable_device(device)
    costs = {name: _counts(name) for name in models}
    settings = {
        "baseline": baseline,
        "weights": {name: None if paper_config(name) else weights_fingerprint(name) for name in models},
        "batch_size": batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
    if output_dir is not None:
        refuse_to_overwrite(output_dir / "efficiency.json")
    with_weights = [name for name in models if paper_config(name) is None and has_file(name, WEIGHT_FILES)]
    for name, speed in measure_speed(with_weights, batch_size, device, dtype).items():
        costs[name]["measured"] = speed
    made_with = environment()
    page = _page(costs, baseline, settings | made_with)
    if output_dir is not None:
        write_page(output_dir / "efficiency", page, data={**settings, "models": costs, **made_with})
    return page


def _counts(name: str) -> dict[str, dict[str, float]]:
    paper = paper_config(name)
    config = paper or config_of(clip_class(name), name)
    with loading(name):
        model, patches = meta_model(config), None if paper else most_patches(config, name)
        return {"parameters": count_parameters(model), "multiply_adds": count_multiply_adds(model, patches)}


# Column -> the numbers of parameters in it
COUNTED = {
    "M parameters": "total",
    "activated": "activated",
    "text": "text",
    "activated, text": "text_activated",
    "vision": "vision",
    "activated, vision": "vision_activated",
    "one expert": "expert",
    "routers, gates": "routers",
}


def _counted(costs: Mapping[str, Any]) -> dict[str, float]:
    return {column: costs["parameters"][name] / 1e6 for column, name in COUNTED.items()}


def _multiply_adds(costs: Mapping[str, Any]) -> dict[str, float]:
    image, text, scores = (costs["multiply_adds"][name] / 1e9 for name in ("image", "text", "attention_scores"))
    both = {"of both": image + text, "without attention scores": image + text - scores}
    return {"G multiply-adds of an image": image, "of a text": text, **both, "GFLOPs of both": 2 * (image + text)}


def _measured(costs: Mapping[str, Any]) -> dict[str, float]:
    measured = costs["measured"]
    return {"images/s": measured["images_per_second"], "captions/s": measured["texts_per_second"]}


def _page(costs: Mapping[str, Any], baseline: str, how: Mapping[str, Any]) -> str:
    measured = {name: model_costs for name, model_costs in costs.items() if "measured" in model_costs}
    sections = [
        "# Efficiency",
        _table(costs, _counted, baseline),
        _table(costs, _multiply_adds, baseline),
        "Activated: what one token meets. Multiply-adds: of one image and one text of full length, by torch's counter; "
        f"a FLOP count is twice as much. In brackets: times {escape(baseline)}.",
    ]
    if measured:
        sections += [
            _table(measured, _measured, baseline),
            f"Medians of {ROUNDS} rounds, in each of which all models have their turn, after one that warms up. Random "
            f"images and texts of full length, {how['batch_size']} at a time, {how['dtype']}; without reading, "
            "decoding and tokenizing.",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in how["versions"].items())
    sections.append(f"{how['device']}, {how['threads']} threads, commit {how['commit']}, {versions}.")
    return "\n\n".join(sections)


def _table(costs: Mapping[str, Any], row_of: Callable[[Mapping[str, Any]], dict[str, float]], baseline: str) -> str:
    rows = {name: row_of(model_costs) for name, model_costs in costs.items()}
    columns, reference = [*next(iter(rows.values()))], rows.get(baseline, {})

    def cell(name: str, column: str) -> str:
        value, other = rows[name][column], reference.get(column)
        return _number(value) + (f" ({value / other:.2f})" if other and name != baseline else "")

    return markdown_table(["model", *columns], [[name, *(cell(name, column) for column in columns)] for name in rows])


def _number(value: float) -> str:
    """With three digits, or two after the point where it is large; nothing for none."""
    if value == 0:
        return ""
    digits = ",.0f" if value >= 10_000 else ".2f" if value >= 10 else ".3f" if value >= 0.1 else ".3g"
    return f"{value:{digits}}"
