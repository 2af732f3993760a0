"""Model cards: what a run left behind, told by `model_cards/template.md`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from transformers import PreTrainedConfig

from conversion.lineage import PICTURES, TASK_TYPES, Lineage
from conversion.markdown import code, escape, one_line

TEMPLATE = Path(__file__).parents[1] / "model_cards" / "template.md"
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


def render(
    config: PreTrainedConfig, lineage: Lineage, repository: str, license: str | None, base_model: str | None
) -> ModelCard:
    """The card of a model.

    Args:
        repository: its name on the Hub.
        license: of its weights, None: unknown.
        base_model: name on the Hub of the dense model that it comes from; None: what its first stages start from, where
            those are names on the Hub.
    """
    results = list(lineage.results.values())
    bases = [base_model] if base_model else lineage.bases
    unknown = [] if base_model else [f"{name}, a local folder of unknown lineage" for name in lineage.unknown]
    data = ModelCardData(
        model_name=repository.split("/")[-1],
        license=license and one_line(license),
        library_name="transformers",
        pipeline_tag="zero-shot-image-classification",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=lineage.datasets or None,
        tags=["clip"] if config.model_type == "clip" else ["clip", "mixture-of-experts", "custom_code"],
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
        lineage=lineage,
        results=results,
        measured=sorted({f"commit {result.get('commit') or 'unknown'}, {result['dtype']}" for result in results}),
        scores=list(_scores(results)),
        pictures={name: PICTURES[name] for name in lineage.pictures},
        base=", ".join([*bases, *unknown]),
        text=escape,
        code=code,
        license=license,
        citations=[CITATIONS[key] for key in dict.fromkeys([*_systems(config, lineage), "clip"])],
    )


def _systems(config: PreTrainedConfig, lineage: Lineage) -> list[str]:
    """Whom to cite: for a sparse model of unknown making, all whose experts it may have."""
    if config.model_type != "clip_moe":
        return [config.model_type]
    presets = [manifest["stage"].get("preset") for manifest in lineage.stages.values()]
    return [key for key in sorted(CITATIONS) if key in presets] or ["clip_up", "clip_moe", "clip_fmoe"]


def result_entries(lineage: Lineage) -> dict[str, str]:
    """File name -> YAML of the Hub's newer format of results, one file a task."""
    files: dict[str, list[EvalResultEntry]] = {}
    for file, result in lineage.results.items():
        entries = [
            EvalResultEntry(
                dataset_id=one_line(result["task"]),
                task_id=metric,
                value=round(100 * result["metrics"][metric], 2),
                date=lineage.dates[file].isoformat(),
                notes=one_line(result["protocol"]),
            )
            for metric in result["primary"]
        ]
        files.setdefault(re.sub(r"[^A-Za-z0-9._-]+", "_", result["task"])[:100], []).extend(entries)
    return {name: json.dumps(eval_result_entries_to_yaml(entries), indent=2) for name, entries in files.items()}


def _scores(results: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str, str]]:
    return [(result, metric, title) for result in results for metric, title in result["primary"].items()]
