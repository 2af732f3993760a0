"""Runs of clip_up_worlds.yaml and names_clock.yaml as points of the law (lab/law/README.md).

python -m lab.law.points runs/law/* --output model_cards/law/points.json
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clip_moe.conversion.checkpoints import load_clip_config
from clip_moe.conversion.upcycle import experts_of_ffn
from clip_moe.engine.command_line import command
from clip_moe.engine.provenance import Record, trainings
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model
from clip_moe.evaluation.task import INFORMATION, PRIMARY_METRICS

# Names of a model's folder and of its score's, in a run of a recipe
STAGES = {"dense": "dense_score", "clip_up": "sparse_score", "model": "scores"}


@dataclass(frozen=True)
class Point:
    """A trained model and what it knows of new pictures of the facts that it was trained on."""

    world: str
    facts: int
    width: int
    experts: int  # in each sparse layer; 0: dense
    experts_per_token: int
    parameters: int  # of the towers' layers
    multiply_adds: int  # of one picture and one text
    batch_size: int
    pairs: int  # trained on, with those of the seed model
    training: int  # multiply-adds of the forward passes over these pairs
    rate: float
    seed: int
    seconds: float  # of training, with the seed model's
    information: float  # share of log2 facts, mean of both directions
    recall: float  # at 1, mean of both directions
    commit: str
    parts: int = 1  # experts that make an FFN

    @property
    def exposures(self) -> float:
        return self.pairs / self.facts


def read_points(folder: Path) -> list[Point]:
    """Points of a run's models that have a score and whose training left chance and did not collapse."""
    points = []
    for name, score in STAGES.items():
        results = [*(folder / score).glob("*--*.json")]
        if not results:
            continue
        (result,) = (json.loads(path.read_text(encoding="utf-8")) for path in results)
        if any(end.is_dead for end in trainings(folder / name).values()):
            continue
        seed_model, model = (_trained(folder / stage) for stage in ("seed_model", name))
        metrics = result["metrics"]
        data, batch_size = model.record.stage["data"], model.record.stage["global_batch_size"]
        pairs = [batch_size * trained.record.stage["max_steps"] for trained in (seed_model, model)]
        points.append(
            Point(
                world=data["source"].rpartition(":")[2].lower(),
                facts=result["num_samples"],
                width=model.width,
                experts=model.experts,
                experts_per_token=model.experts_per_token,
                parameters=model.parameters,
                multiply_adds=model.multiply_adds,
                batch_size=batch_size,
                pairs=sum(pairs),
                training=pairs[0] * seed_model.multiply_adds + pairs[1] * model.multiply_adds,
                rate=model.record.stage["learning_rate"],
                seed=model.record.seed,
                seconds=round(seed_model.seconds + model.seconds, 1),
                information=statistics.mean(metrics[metric] for metric in INFORMATION),
                recall=statistics.mean(metrics[metric] for metric in PRIMARY_METRICS["retrieval"]),
                commit=model.record.attempts[-1].commit,
                parts=model.parts,
            )
        )
    return points


@dataclass(frozen=True)
class _Trained:
    record: Record
    width: int
    experts: int
    experts_per_token: int
    parts: int
    parameters: int
    multiply_adds: int
    seconds: float


def _trained(folder: Path) -> _Trained:
    config = load_clip_config(str(folder))
    model, record, text = meta_model(config), Record.read(folder), config.text_config
    counted = count_multiply_adds(model)
    is_sparse = bool(getattr(text, "moe_layers", None))
    return _Trained(
        record,
        text.hidden_size,
        text.num_experts if is_sparse else 0,
        text.num_experts_per_tok if is_sparse else 0,
        experts_of_ffn(text) if is_sparse else 1,
        count_parameters(model)["layers"],
        counted["image"] + counted["text"],
        sum(attempt.seconds or 0 for attempt in record.attempts),
    )


@command
def collect(folders: Sequence[Path], /, output: Path) -> str:
    """Add the points of runs to those in OUTPUT, as JSON.

    Args:
        folders: runs of clip_up_worlds.yaml or names_clock.yaml.
    """
    known = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else []
    known = [asdict(Point(**point)) for point in known]
    found = [asdict(point) for folder in folders for point in read_points(folder)]
    points = known + [point for point in found if point not in known]
    order = ("world", "facts", "width", "pairs", "experts", "experts_per_token", "seed", "rate")
    points.sort(key=lambda point: [point[name] for name in order])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("[\n" + ",\n".join(json.dumps(point) for point in points) + "\n]\n", encoding="utf-8")
    return f"{len(points)} points, {len(points) - len(known)} of them new"


if __name__ == "__main__":
    collect.main()
