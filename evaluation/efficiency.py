"""The costs of models, dense beside sparse: parameters, multiply-adds and speed."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from clip_moe.conversion.checkpoints import load_clip_config, loading
from clip_moe.conversion.processors import most_patches
from clip_moe.engine.markdown import escape, markdown_table
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model, paper_config
from clip_moe.evaluation.results import computed_with
from clip_moe.evaluation.speed import ROUNDS

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def count_costs(name: str) -> dict[str, dict[str, float]]:
    """The parameters and multiply-adds of a folder, Hub name or paper's size; see `clip_moe.evaluation.costs`."""
    paper = paper_config(name)
    config = paper or load_clip_config(name)
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


MEASURED = {"images/s": "images_per_second", "captions/s": "texts_per_second"}


def _multiply_adds(costs: Mapping[str, Any]) -> dict[str, float]:
    image, text, scores = (costs["multiply_adds"][name] / 1e9 for name in ("image", "text", "attention_scores"))
    both = {"of both": image + text, "without attention scores": image + text - scores}
    return {"G multiply-adds of an image": image, "of a text": text, **both, "GFLOPs of both": 2 * (image + text)}


def efficiency_page(costs: Mapping[str, Any], baseline: str, how: Mapping[str, Any]) -> str:
    """A table of what was counted, and one of what was measured, of models with weights.

    Args:
        costs: model -> `count_costs`, and perhaps `measured`.
        how: settings, device and versions.
    """
    measured = {name: model_costs for name, model_costs in costs.items() if "measured" in model_costs}
    sections = [
        "# Efficiency",
        _table(costs, lambda row: {title: row["parameters"][name] / 1e6 for title, name in COUNTED.items()}, baseline),
        _table(costs, _multiply_adds, baseline),
        "Activated: what one token meets. Multiply-adds: of one image and one text of full length, by torch's counter; "
        f"a FLOP count is twice as much. In brackets: times {escape(baseline)}.",
    ]
    if measured:
        sections += [
            _table(measured, lambda row: {title: row["measured"][unit] for title, unit in MEASURED.items()}, baseline),
            f"Medians of {ROUNDS} rounds, in each of which all models have their turn, after one that warms up. Random "
            f"images and texts of full length, {how['batch_size']} at a time, {how['dtype']}; without reading, "
            "decoding and tokenizing.",
        ]
    sections.append(f"{how['device']}, {how['threads']} threads, {computed_with(how)}.")
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
