"""What models cost, dense beside sparse: parameters, multiply-adds, speed and memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from conversion.checkpoints import clip_class, config_of, has_file, loading
from conversion.processors import most_patches
from evaluation.costs import count_multiply_adds, count_parameters, meta_model, paper_config
from evaluation.embedder import usable_device
from evaluation.page import write_page
from evaluation.speed import ROUNDS, measure_memory, measure_speed
from records.files import refuse_to_overwrite
from records.markdown import escape, markdown_table
from records.messages import did_you_mean
from records.provenance import device_name, environment, weights_fingerprint

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)

# Bits to remember for each parameter of a dense model's layers, up to which a verdict holds, and how many parameters
# these layers had where it was measured: see `_to_remember`
VERDICTS = (
    (0.3, "it has room for them, and a sparse model has nothing to gain"),
    (1.2, "inconclusive: train both, as docs/own_pictures.md does"),
    (5.0, "a sparse model should beat a dense one of its width, if training shows each caption about 1,000 times"),
    (16.0, "a sparse model may learn more than a dense one of its width, and both learn little: one run"),
    (math.inf, "this is too much for it, and for a sparse model"),
)
MEASURED = (3_000, 51_000)


def compare_models(
    models: Sequence[str],
    *,
    baseline: str | None = None,
    captions: int | None = None,
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
        "captions": captions,
        "weights": {name: None if paper_config(name) else weights_fingerprint(name) for name in models},
        "batch_size": batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
    if output_dir is not None:
        refuse_to_overwrite(output_dir / "efficiency.json")
    with_weights = [name for name in models if paper_config(name) is None and has_file(name, WEIGHT_FILES)]
    for name in with_weights:  # before all of them are in memory
        costs[name]["measured"] = measure_memory(name, batch_size, device, dtype)
    for name, speed in measure_speed(with_weights, batch_size, device, dtype).items():
        costs[name]["measured"] |= speed
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
    peak, before = (measured.get(name, 0) / 2**20 for name in ("peak_memory", "memory_before"))
    speed = {"images/s": measured["images_per_second"], "captions/s": measured["texts_per_second"]}
    return speed | {"peak MiB": peak, "peak MiB above start": peak - before}


def _page(costs: Mapping[str, Any], baseline: str, how: Mapping[str, Any]) -> str:
    measured = {name: of_model for name, of_model in costs.items() if "measured" in of_model}
    sections = [
        "# Efficiency",
        _table(costs, _counted, baseline),
        _table(costs, _multiply_adds, baseline),
        "Activated: what one token meets. Multiply-adds: of one image and one text of full length, by torch's counter; "
        f"a FLOP count is twice as much. In brackets: times {escape(baseline)}.",
    ]
    if how.get("captions"):
        sections.append(_to_remember(costs, how["captions"]))
    if measured:
        of_process = any("memory_before" in of_model["measured"] for of_model in measured.values())  # on a CPU
        memory = "the process, which starts with its libraries," if of_process else "the accelerator"
        sections += [
            _table(measured, _measured, baseline),
            f"Medians of {ROUNDS} rounds, in each of which all models have their turn, after one that warms up. Random "
            f"images and texts of full length, {how['batch_size']} at a time, {how['dtype']}; without reading, "
            f"decoding and tokenizing. Memory: of {memory} for one model alone.",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in how["versions"].items())
    sections.append(f"{how['device']}, {how['threads']} threads, commit {how['commit']}, {versions}.")
    return "\n\n".join(sections)


def _to_remember(costs: Mapping[str, Any], captions: int) -> str:
    """Whether there is much to remember: bits against parameters, and the rule of `docs/results.md`."""
    bits = captions * math.log2(captions)

    def in_layers(costs: Mapping[str, Any]) -> dict[str, float]:
        number = costs["parameters"]["layers"]
        return {"M parameters in the layers": number / 1e6, "bits to remember, for each": bits / number}

    table = _table(costs, in_layers, "")
    of_dense = {name: bits / of["parameters"]["layers"] for name, of in costs.items() if not of["parameters"]["expert"]}

    def verdict(name: str, share: float) -> str:
        layers = costs[name]["parameters"]["layers"]
        if not MEASURED[0] <= layers <= MEASURED[1]:
            return f"no verdict, since its layers have {layers:,} parameters: train both, as docs/own_pictures.md does"
        return next(what for end, what in VERDICTS if share < end)

    verdicts = (f"\n\n{escape(name)}, {share:.1f} bits: {verdict(name, share)}." for name, share in of_dense.items())
    return (
        f"To remember: to tell {captions:,} captions from each other takes {captions:,} x log2 {captions:,} = "
        f"{bits:,.0f} bits.\n\n{table}\n\n"
        "A rule of thumb, counted as here and measured on models of 3 to 51 thousand parameters in their layers that "
        "remember names (docs/results.md), each shown about 1,000 times, with equal multiply-adds for dense and sparse "
        "models of one width: where a dense model had 3.7 bits to remember for each parameter of its layers, a sparse "
        "one scored 61 ± 1 points more; with 1.7, in a quarter of the steps, 35 ± 21; with 0.8, 2 ± 4, which is "
        "inconclusive; with 0.2 there was nothing to gain; with 14, in one run, it remembered 20.5 % and the dense "
        "one 12.1 %; with 17 and a quarter of the exposures, neither had learned. What captions have in common is "
        f"understood and need not be remembered one by one, so this is the most that there can be.{''.join(verdicts)}"
    )


def _table(costs: Mapping[str, Any], row_of: Callable[[Mapping[str, Any]], dict[str, float]], baseline: str) -> str:
    rows = {name: row_of(of_model) for name, of_model in costs.items()}
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
