"""Model cards: what a run left behind, told by `model_cards/template.md`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from transformers import PreTrainedConfig

from conversion.provenance import ATTEMPTS, MANIFEST, RECIPE

TEMPLATE = Path(__file__).parents[1] / "model_cards" / "template.md"
# Stages whose results tell something of a model
PICTURES = {"report.png": "scores", "routing.png": "routing", "gates.png": "fusion gates"}
TASK_TYPES = {
    "accuracy": ("zero-shot-image-classification", "Zero-shot image classification"),
    "group": ("image-text-matching", "Attribute pairs"),
    "image_to_text_recall@1": ("image-text-retrieval", "Image-text retrieval"),
    "text_to_image_recall@1": ("image-text-retrieval", "Image-text retrieval"),
}

# By the preset of conversion.upcycle, or the type of the model
CITATIONS = {
    "clip_up": """@article{wang2025clipup,
  title = {{CLIP-UP}: A Simple and Efficient Mixture-of-Experts {CLIP} Training Recipe with Sparse Upcycling},
  author = {Wang, Xinze and Chen, Chen and Yang, Yinfei and Chen, Hong-You and Zhang, Bowen and Pal, Aditya and
            Zhu, Xiangxin and Du, Xianzhi},
  journal = {arXiv preprint arXiv:2502.00965},
  year = {2025}
}""",
    "clip_moe": """@article{zhang2024clipmoe,
  title = {{CLIP-MoE}: Towards Building Mixture of Experts for {CLIP} with Diversified Multiplet Upcycling},
  author = {Zhang, Jihai and Qu, Xiaoye and Zhu, Tong and Cheng, Yu},
  journal = {arXiv preprint arXiv:2409.19291},
  year = {2024}
}""",
    "clip_fmoe": """@misc{tranclipfmoe,
  title = {{CLIP-FMoE}: Scalable {CLIP} via Fused Mixture-of-Experts with Enforced Specialization},
  author = {Tran, Luong and Nguyen, Lan-Cuong and Nguyen, Huynh Dang and Dat, Nguyen Cong and Le, Dung D. and
            Nguyen, Van}
}""",
    "clip_mode": """@inproceedings{ma2024mode,
  title = {{MoDE}: {CLIP} Data Experts via Clustering},
  author = {Ma, Jiawei and Huang, Po-Yao and Xie, Saining and Li, Shang-Wen and Zettlemoyer, Luke and
            Chang, Shih-Fu and Yih, Wen-Tau and Xu, Hu},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}""",
    "clip": """@inproceedings{radford2021clip,
  title = {Learning Transferable Visual Models From Natural Language Supervision},
  author = {Radford, Alec and Kim, Jong Wook and Hallacy, Chris and Ramesh, Aditya and Goh, Gabriel and
            Agarwal, Sandhini and Sastry, Girish and Askell, Amanda and Mishkin, Pamela and Clark, Jack and
            Krueger, Gretchen and Sutskever, Ilya},
  booktitle = {International Conference on Machine Learning},
  year = {2021}
}""",
}


@dataclass(frozen=True)
class Provenance:
    """What is known of how a model came to be.

    Args:
        folder: of the model.
        recipe: of the run it is a stage of.
        stages: manifests of the stage and of all stages that it goes back to, the first one first.
        attempts: of each of these, what its attempts ran on and took, where that was recorded.
        results: files of the evaluations of this model in the run.
        pictures: name -> file.
    """

    folder: Path
    recipe: Path | None
    stages: dict[str, dict[str, Any]]
    attempts: dict[str, list[dict[str, Any]]]
    results: list[Path]
    pictures: dict[str, Path]

    @classmethod
    def of(cls, folder: Path) -> "Provenance":
        """What the folder of a model tells, and if it is a stage's the run around it."""
        run, stages = folder.parent, {}
        if not (folder / MANIFEST).is_file() or not (run / RECIPE).is_file():
            return cls(folder, None, {}, {}, [], {})
        _add(run, folder.name, stages)
        attempts = {name: _read(run / name / ATTEMPTS) for name in stages if (run / name / ATTEMPTS).is_file()}
        results = [path for path in sorted(run.glob("*/*--*.json")) if Path(_read(path)["source"]).name == folder.name]
        pictures = {}
        for manifest in sorted(run.glob(f"*/{MANIFEST}")):
            stage = _read(manifest)["stage"]
            ours = stage.get("model") == folder.name or folder.name in stage.get("models", {}).values()
            if stage["stage"] in ("evaluate", "analyze") and ours:
                found = {name: manifest.parent / name for name in PICTURES}
                pictures |= {name: path for name, path in found.items() if path.is_file()}
        return cls(folder, run / RECIPE, stages, attempts, results, pictures)

    @property
    def sources(self) -> list[str]:
        """What the first stages start from: folders and hub names that no stage makes."""
        inputs = [name for manifest in self.stages.values() for name in manifest["inputs"]]
        return sorted({name for name in inputs if name not in self.stages})

    @property
    def datasets(self) -> list[str]:
        """The data of all stages that have some."""
        found = {(manifest["stage"].get("data") or {}).get("source") for manifest in self.stages.values()}
        return sorted(source for source in found if source and source not in self.stages)

    @property
    def presets(self) -> list[str]:
        """The systems of the papers that its stages follow."""
        return sorted({preset for m in self.stages.values() if (preset := m["stage"].get("preset")) in CITATIONS})

    @property
    def hours(self) -> float:
        """Of all finished attempts of all stages."""
        return sum(attempt["seconds"] or 0 for attempt in self._all_attempts) / 3600

    @property
    def interruptions(self) -> int:
        """Attempts that did not end, whose time is not known."""
        return sum(attempt["seconds"] is None for attempt in self._all_attempts)

    @property
    def hardware(self) -> list[str]:
        return sorted({f"{attempt['num_processes']} x {attempt['device']}" for attempt in self._all_attempts})

    @property
    def commits(self) -> list[str]:
        return sorted({attempt["commit"] for attempt in self._all_attempts if attempt["commit"]})

    @property
    def _all_attempts(self) -> list[dict[str, Any]]:
        return [attempt for attempts in self.attempts.values() for attempt in attempts]


def render(
    config: PreTrainedConfig, provenance: Provenance, repository: str, licence: str | None, base_model: str | None
) -> ModelCard:
    """The card of a model.

    Args:
        repository: its name on the Hub.
        licence: of its weights, None: unknown.
        base_model: name on the Hub of the dense model that it comes from; None: what its first stage starts from, where
            that is no folder.
    """
    results = [_read(path) for path in provenance.results]
    hub_sources = [source for source in provenance.sources if not Path(source).exists()]
    data = ModelCardData(
        model_name=repository.split("/")[-1],
        license=licence,
        library_name="transformers",
        pipeline_tag="zero-shot-image-classification",
        base_model=base_model or (hub_sources[0] if hub_sources else None),
        datasets=[source for source in provenance.datasets if source != "glyphs" and not Path(source).exists()] or None,
        tags=["clip"] if config.model_type == "clip" else ["clip", "mixture-of-experts", "custom_code"],
        eval_results=[
            EvalResult(
                task_type=TASK_TYPES[metric][0],
                task_name=TASK_TYPES[metric][1],
                dataset_type=result["task"],
                dataset_name=result["title"],
                metric_type=metric,
                metric_name=title,
                metric_value=round(100 * result["metrics"][metric], 2),
            )
            for result, metric, title in _scores(results)
        ]
        or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=repository.split("/")[-1],
        repository=repository,
        config=config,
        towers={name: getattr(config, f"{name}_config", None) for name in ("vision", "text")},
        provenance=provenance,
        results=results,
        measured=sorted({f"commit {result['commit']}, {result['dtype']}" for result in results}),
        scores=list(_scores(results)),
        pictures={name: PICTURES[name] for name in provenance.pictures},
        base=base_model or ", ".join(provenance.sources),
        licence=licence,
        citations=[CITATIONS[key] for key in dict.fromkeys([*_systems(config, provenance), "clip"])],
    )


def _systems(config: PreTrainedConfig, provenance: Provenance) -> list[str]:
    """Whom to cite: for a sparse model of unknown making, all whose experts it may have."""
    if config.model_type != "clip_moe":
        return [config.model_type]
    return provenance.presets or ["clip_up", "clip_moe", "clip_fmoe"]


def result_entries(provenance: Provenance) -> dict[str, str]:
    """File name -> YAML of the Hub's newer format of results, one file a task."""
    files = {}
    for path in provenance.results:
        result, measured = _read(path), date.fromtimestamp(path.stat().st_mtime)
        entries = [
            EvalResultEntry(
                dataset_id=result["task"],
                task_id=metric,
                value=round(100 * result["metrics"][metric], 2),
                date=measured.isoformat(),
                notes=result["protocol"],
            )
            for metric in result["primary"]
        ]
        files[result["task"]] = json.dumps(eval_result_entries_to_yaml(entries), indent=2)
    return files


def _scores(results: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str, str]]:
    return [(result, metric, title) for result in results for metric, title in result["primary"].items()]


def _add(run: Path, name: str, stages: dict[str, dict[str, Any]]) -> None:
    """The manifest of a stage, after those of all stages that it goes back to."""
    if name in stages or not (run / name / MANIFEST).is_file():
        return
    manifest = _read(run / name / MANIFEST)
    for reference in manifest["inputs"]:
        _add(run, reference, stages)
    stages[name] = manifest


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
