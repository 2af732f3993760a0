"""Model cards: the records and results of a run in `model_cards/template.md`."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from clip_moe.conversion.publishing.lineage import PICTURES, TASK_TYPES, Lineage
from clip_moe.data.worlds import WORLDS, world
from clip_moe.engine.intervals import score_reach
from clip_moe.engine.markdown import code, escape
from clip_moe.engine.messages import one_line
from clip_moe.engine.provenance import Record, duplicates_line
from clip_moe.engine.result_schema import ExpertSummary
from modeling_clip_moe import CLIPMoDEConfig
from modeling_clip_moe.families import Family, family_of, longest_text, model_class

TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"
# Texts of examples, of what knows photos and of what knows something else
PHOTOS = ["a photo of a cat", "a photo of a dog"]
PLACEHOLDERS = ["one text about the image", "another text"]
# How every OpenAI's CLIP on the Hub is called
OPENAI = "openai/clip-"
# The settings of a stage that a card shows
SHOWN_SETTINGS = ("preset", "model", "models", "weights", "global_batch_size", "max_steps", "num_epochs")
SHOWN_SETTINGS += ("learning_rate", "weight_decay", "changes", "text_config", "vision_config", "lora")


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
    template: str = "{}",
) -> ModelCard:
    """The card of a model.

    Args:
        repository, license, base_model: see `clip_moe.conversion.publishing.bundle.build`.
        experts: the configurations of a mixture's experts.
        longest_cut: the most tokens that its tokenizer makes of a text; None: as many as the model takes.
        template: a text with a {} for a label that the model was trained on.
    """
    measured = {
        f"commit {result.get('commit') or 'unknown'}, {result['dtype']}, "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        for result in lineage.results.values()
    }
    bases = [base_model] if base_model else lineage.bases
    unknown = [] if base_model else [f"{name}, a local folder of unknown lineage" for name in lineage.unknown]
    towers = {name: getattr(config, f"{name}_config", None) for name in ("vision", "text")}
    families = list(dict.fromkeys(family_of(model) for model in experts or [config]))
    is_mixture = isinstance(config, CLIPMoDEConfig)
    is_sparse = not is_mixture and model_class(config) is families[0].sparse
    custom_code = is_mixture or is_sparse or families[0].has_own_dense
    papers = [config.model_type] if is_mixture else _presets(lineage, families[0]) if is_sparse else []
    examples = _examples(lineage, bases)
    is_initialized = any(record.stage.get("stage") == "initialize" for record in lineage.stages.values())
    return ModelCard.from_template(
        _metadata(custom_code, lineage, repository, license, bases),
        template_path=str(TEMPLATE),
        name=repository.split("/")[-1],
        repository=repository,
        config=config,
        family=families[0],
        families=families,
        is_sparse=is_sparse,
        custom_code=custom_code,  # beside the weights
        towers=towers,
        text_length=towers["text"] and min(longest_text(towers["text"]), longest_cut or sys.maxsize),
        examples=examples,
        labels=_labels(examples, template),
        from_scratch=is_initialized and not bases and not lineage.unknown,
        from_openai=bool(bases) and all(base.startswith(OPENAI) for base in bases),
        stages=[(name, *_stage_row(record)) for name, record in lineage.stages.items()],
        other_runs=sorted({name.split("/")[0] for name in lineage.stages if "/" in name}),
        hardware=sorted({f"{attempt.num_processes} x {attempt.device}" for attempt in lineage.attempts}),
        hours=sum(attempt.seconds or 0 for attempt in lineage.attempts) / 3600,
        interruptions=sum(attempt.seconds is None for attempt in lineage.attempts),
        commits=sorted({attempt.commit for attempt in lineage.attempts if attempt.commit}),
        lineage=lineage,
        how_to_read_experts=ExpertSummary.READING,
        measured=sorted(measured),
        scores=[
            (result, metric, title, _interval(result, metric), _beside(lineage.baselines.get(name), metric))
            for name, result in lineage.results.items()
            for metric, title in result["primary"].items()
        ],
        pictures={name: PICTURES[name] for name in lineage.pictures},
        base=", ".join([*bases, *unknown]),
        text=escape,
        code=code,
        license=license and license.removeprefix("other:"),
        citations=list(dict.fromkeys(citations()[key] for key in [*papers, *(f.model_type for f in families), "clip"])),
    )


def _metadata(
    custom_code: bool, lineage: Lineage, repository: str, license: str | None, bases: list[str]
) -> ModelCardData:
    scores = [
        EvalResult(
            task_type=TASK_TYPES[metric][0],
            task_name=TASK_TYPES[metric][1],
            dataset_type=one_line(result["task"]),
            dataset_name=one_line(result["title"]),
            metric_type=metric,
            metric_name=one_line(title),
            metric_value=round(100 * result["metrics"][metric], 2),
        )
        for result in lineage.results.values()
        for metric, title in result["primary"].items()
        if metric in TASK_TYPES
    ]
    kind, _, license_name = (license or "").partition(":")
    return ModelCardData(
        model_name=repository.split("/")[-1],
        license=kind or None,
        license_name=one_line(license_name) or None,
        library_name="transformers",
        pipeline_tag="zero-shot-image-classification",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=[data.name for data in lineage.data if data.where == "hub"] or None,
        tags=["clip", "mixture-of-experts", "custom_code"] if custom_code else ["clip"],
        eval_results=scores or None,
    )


def _presets(lineage: Lineage, family: Family) -> list[str]:
    """Keys of papers to cite for a sparse model; without a known one, all of sparse CLIPs, if it is a CLIP's family."""
    names = [record.stage.get(key) for record in lineage.stages.values() for key in ("preset", "stage")]
    known = [key for key in sorted(citations()) if key in names or f"released_{key}" in names]
    return known or ([] if family.has_own_dense else ["clip_up", "clip_moe", "clip_fmoe"])


def _examples(lineage: Lineage, bases: list[str]) -> list[str]:
    """Two texts that the model may know. Those of somebody's own data are not told."""
    name = next((data.name for data in lineage.data if data.where == "world"), None)
    if name is not None:
        return list(world(name).examples) if name in WORLDS else PLACEHOLDERS
    return PHOTOS if any(base.startswith(OPENAI) for base in bases) else PLACEHOLDERS


def _labels(texts: list[str], template: str) -> tuple[list[str], str]:
    """Labels and the template that make these texts of them: that of the model, if it can."""
    before, after = template.split("{}")
    labels = [text.removeprefix(before).removesuffix(after) for text in texts]
    return (labels, template) if [template.format(label) for label in labels] == texts else (texts, "{}")


def _stage_row(record: Record) -> tuple[str, str]:
    """The kind of a stage, and its settings."""
    stage, kind = record.stage, str(record.stage.get("stage"))
    names = dict.fromkeys([*SHOWN_SETTINGS, *record.own_settings])
    settings = [f"{name} {stage[name]}" for name in names if stage.get(name) not in (None, {})]
    if record.duplicates and record.duplicates["shuffled"]:
        settings.append(duplicates_line(record.duplicates, stage["duplicates"]))
    if record.training and record.training.outcome:
        settings.append(record.training.outcome)
    return kind, ", ".join(filter(None, settings))


def _interval(result: dict[str, Any], metric: str) -> str:
    """The ends of a score's interval over test samples, in percent; nothing where it is no mean over them."""
    reach, value = score_reach(result, metric), result["metrics"][metric]
    return f"{100 * (value - reach[0]):.1f} to {100 * (value + reach[1]):.1f}" if reach else ""


def _beside(baseline: dict[str, Any] | None, metric: str) -> str:
    """The baseline's score in percent, with its name."""
    return f"{100 * baseline['metrics'][metric]:.1f} ({baseline['model']})" if baseline else ""
