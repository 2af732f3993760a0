"""Model cards: the records and results of a run in `model_cards/template.md`."""

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from clip_moe.conversion.publishing.lineage import PICTURES, TASK_TYPES, WORLDS, Lineage
from clip_moe.engine.intervals import score_reach
from clip_moe.engine.markdown import code, escape, one_line
from clip_moe.engine.messages import did_you_mean
from clip_moe.engine.provenance import Record, duplicates_line
from clip_moe.engine.result_schema import ExpertSummary
from modeling_clip_moe import CLIPMoDEConfig
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import family_of, longest_text

TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"
# Texts of examples, of what knows photos and of what knows something else
PHOTOS = ["a photo of a cat", "a photo of a dog"]
PLACEHOLDERS = ["one text about the image", "another text"]
# How every OpenAI's CLIP on the Hub is called
OPENAI = "openai/clip-"
# The settings of a stage that a card shows
SHOWN_SETTINGS = (
    "preset",
    "model",
    "models",
    "weights",
    "global_batch_size",
    "max_steps",
    "num_epochs",
    "learning_rate",
    "weight_decay",
)
# Those that make another method of it, shown where they are set, with the arXiv number of its paper
METHODS = {
    "changes": None,
    "text_config": None,
    "vision_config": None,
    "lora": "2106.09685",
}


# Those that the Hub knows (https://huggingface.co/docs/hub/repositories-licenses)
LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research intel-research isc lgpl
lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by
ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense wtfpl zlib
""".split()


def require_license(license: str | None) -> dict[str, str]:
    """The entries of a card's metadata for a license of the Hub, or for another one, as `other:NAME`.

    Raises:
        ValueError: the Hub knows no such license.
    """
    if license is None:
        return {}
    kind, _, name = license.partition(":")
    if kind == "other" and name.strip():
        return {"license": kind, "license_name": one_line(name.strip())}
    if license not in LICENSES:
        similar = did_you_mean("-".join(license.lower().split()), LICENSES)
        raise ValueError(
            f"--license {license!r} is none of the Hub's{similar}: give one of "
            "https://huggingface.co/docs/hub/repositories-licenses, or other:NAME"
        )
    return {"license": license}


@functools.cache
def citations() -> dict[str, str]:
    """The entry of each paper. A Space, which has no card to make, has no such file."""
    return yaml.safe_load(TEMPLATE.with_name("citations.yaml").read_text(encoding="utf-8"))


def render(
    config: PreTrainedConfig,
    lineage: Lineage,
    repository: str,
    license: str | None,
    base_model: str | None,
    experts: Sequence[PreTrainedConfig] = (),
    longest_cut: int | None = None,
    revision: str = "main",
    template: str = "{}",
) -> ModelCard:
    """The card of a model.

    Args:
        repository, license, base_model, revision: see `conversion.publishing.bundle.build`.
        experts: the configurations of a mixture's experts.
        template: a text with a {} for a label that the model was trained on.
        longest_cut: the most tokens that its tokenizer makes of a text; None: as many as the model takes.
    """
    results = list(lineage.results.values())
    measured = {
        f"commit {result.get('commit') or 'unknown'}, {result['dtype']}, "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        for result in results
    }
    bases = [base_model] if base_model else lineage.bases
    unknown = [] if base_model else [f"{name}, a local folder of unknown lineage" for name in lineage.unknown]
    towers = {name: getattr(config, f"{name}_config", None) for name in ("vision", "text")}
    mixture, is_sparse = isinstance(config, CLIPMoDEConfig), isinstance(config, SparseMoEConfig)
    families = list(dict.fromkeys(family_of(model) for model in experts or [config]))
    papers = [config.model_type] if mixture else _presets(lineage) if is_sparse else []
    return ModelCard.from_template(
        _metadata(mixture or is_sparse, lineage, repository, license, bases),
        template_path=str(TEMPLATE),
        name=repository.split("/")[-1],
        repository=repository,
        revision=revision,
        config=config,
        family=families[0],
        families=families,
        is_sparse=is_sparse,
        custom_code=mixture or is_sparse,  # beside the weights
        towers=towers,
        text_length=towers["text"] and min(longest_text(towers["text"]), longest_cut or sys.maxsize),
        examples=(examples := _examples(lineage, bases)),
        labels=_labels(examples, template),
        from_scratch=lineage.is_from_scratch and not bases,
        from_openai=bool(bases) and all(base.startswith(OPENAI) for base in bases),
        stages=[(name, *_stage_row(record)) for name, record in lineage.stages.items()],
        lineage=lineage,
        how_to_read_experts=ExpertSummary.READING,
        results=results,
        measured=sorted(measured),
        scores=[(*score, _interval(*score[:2]), _beside(lineage, *score[:2])) for score in _scores(results)],
        pictures={name: PICTURES[name] for name in lineage.pictures},
        base=", ".join([*bases, *unknown]),
        text=escape,
        code=code,
        license=license and license.removeprefix("other:"),
        citations=[citations()[key] for key in dict.fromkeys([*papers, *(f.model_type for f in families), "clip"])],
    )


def _metadata(
    custom_code: bool, lineage: Lineage, repository: str, license: str | None, bases: list[str]
) -> ModelCardData:
    return ModelCardData(
        model_name=repository.split("/")[-1],
        **require_license(license),
        library_name="transformers",
        pipeline_tag="zero-shot-image-classification",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=[data.name for data in lineage.data if data.where == "hub"] or None,
        tags=["clip", "mixture-of-experts", "custom_code"] if custom_code else ["clip"],
        eval_results=[
            EvalResult(
                task_type=TASK_TYPES[metric][0],
                task_name=TASK_TYPES[metric][1],
                dataset_type=one_line(result["task"]),
                dataset_name=one_line(result["title"]),
                metric_type=metric,
                metric_name=one_line(title),
                metric_value=round(100 * result["metrics"][metric], 2),
            )
            for result, metric, title in _scores(list(lineage.results.values()))
            if metric in TASK_TYPES
        ]
        or None,
    )


def _presets(lineage: Lineage) -> list[str]:
    """Keys of papers to cite for a sparse model: where the preset is unknown, all of sparse CLIPs."""
    presets = [record.stage.get("preset") for record in lineage.stages.values()]
    return [key for key in sorted(citations()) if key in presets] or ["clip_up", "clip_moe", "clip_fmoe"]


def _examples(lineage: Lineage, bases: list[str]) -> list[str]:
    """Two texts that the model may know. Those of somebody's own data are not told."""
    world = next((data.name for data in lineage.data if data.where == "world"), None)
    if world is not None:
        return WORLDS.get(world, PLACEHOLDERS)
    return PHOTOS if any(base.startswith(OPENAI) for base in bases) else PLACEHOLDERS


def _labels(texts: list[str], template: str) -> tuple[list[str], str]:
    """Labels and the template that make these texts of them: that of the model, if it can."""
    before, after = template.split("{}")
    labels = [text.removeprefix(before).removesuffix(after) for text in texts]
    return (labels, template) if [template.format(label) for label in labels] == texts else (texts, "{}")


def _stage_row(record: Record) -> tuple[str, str]:
    """The kind of a stage, with the docstring of a user's own class, and its settings."""
    stage, own = record.stage, record.own
    kind = f"{stage.get('stage')}: {own.does}" if own and own.does else str(stage.get("stage"))
    names = dict.fromkeys([*SHOWN_SETTINGS, *(own.settings if own else [])])
    settings = [f"{name} {stage[name]}" for name in names if stage.get(name) is not None]
    for name, paper in METHODS.items():
        if stage.get(name) not in (None, {}):
            shown = yaml.safe_dump(stage[name], default_flow_style=True, width=math.inf).removesuffix("\n...\n").strip()
            settings.append(f"{name} {shown}" + (f" (arXiv:{paper})" if paper else ""))
    if record.duplicates and record.duplicates["shuffled"]:
        settings.append(duplicates_line(record.duplicates, stage["duplicates"]))
    if record.training and record.training.outcome:
        settings.append(record.training.outcome)
    return kind, ", ".join(filter(None, settings))


def _interval(result: dict[str, Any], metric: str) -> str:
    """The ends of a score's interval over test samples, in percent; nothing where it is no mean over them."""
    reach, value = score_reach(result, metric), result["metrics"][metric]
    return f"{100 * (value - reach[0]):.1f} to {100 * (value + reach[1]):.1f}" if reach else ""


def _beside(lineage: Lineage, result: dict[str, Any], metric: str) -> str:
    """The baseline's score beside one of the model's, in percent, with its name."""
    baseline = next((lineage.baselines.get(name) for name, own in lineage.results.items() if own is result), None)
    return f"{100 * baseline['metrics'][metric]:.1f} ({baseline['model']})" if baseline else ""


def _scores(results: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str, str]]:
    return [(result, metric, title) for result in results for metric, title in result["primary"].items()]
