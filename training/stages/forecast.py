"""The stage that sets what the law says beside what came out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from data.arguments import DataArguments
from records.provenance import MANIFEST, Record
from training.settings import STRICT
from training.stages.evaluate import EvaluateStage

ROWS = ("dense", "sparse")


@dataclass(config=STRICT, kw_only=True)
class ForecastStage(EvaluateStage):
    """An `evaluate` stage whose report begins with what the law of docs/law.md says of a dense and a sparse model, from
    the captions and the training alone, beside what came out.

    It compares the rows `dense` and `sparse`, which were trained in this run for a number of steps. The first task
    counts.

        clip-moe forecast runs/both --models.dense runs/dense --models.sparse runs/sparse --data.source my/logos \\
            --tasks "{task: retrieval, dataset: my/logos, split: test}"
    """

    kind: ClassVar[str] = "forecast"

    # What both have learned.
    data: DataArguments
    # The row that the other is compared with.
    baseline: str | None = "dense"

    @model_validator(mode="after")
    def _check_rows(self):
        if missing := [row for row in ROWS if row not in self.models]:
            raise ValueError(f"models needs the rows dense and sparse, and has no {', '.join(missing)}")
        return self

    def head(self, results: list[dict[str, Any]], inputs: SimpleNamespace) -> str:
        from conversion.checkpoints import clip_class, config_of
        from evaluation.forecast import CAVEAT, count_captions, forecast, trained
        from evaluation.law import fitted_law
        from evaluation.task import INFORMATION

        folders = [Path(inputs.models[row]) for row in ROWS]
        counted = count_captions(self.data, [str(folder) for folder in folders])
        facts = fitted_law()[0].facts(counted.different, self.data.source)
        models = [
            trained(config_of(clip_class(str(folder)), str(folder)), pairs_shown(folder) / counted.different)
            for folder in folders
        ]
        said = forecast(facts, *models)
        predicted = f"no verdict. {'; '.join(said.outside)}." if said.outside else f"{said.sentence} {CAVEAT}"
        first = {row: next(result for result in results if result["model"] == row) for row in ROWS}
        shares = [sum(first[row]["metrics"][way] for way in INFORMATION) / len(INFORMATION) for row in ROWS]
        lines = [
            counted.sentence,
            f"*Predicted*, with experts: {predicted}",
            f"*Came out*: {shares[1]:.0%} instead of {shares[0]:.0%}, {100 * (shares[1] - shares[0]):+.1f} points.",
        ]
        return "\n\n".join([*lines, super().head(results, inputs)]).strip()


def pairs_shown(folder: Path) -> int:
    """How many pairs a model was trained on, with those of the models that it began with, whose folders lie beside it.

    Raises:
        ValueError: a model trained for epochs, or none that was trained here.
    """
    record, pairs = Record.read(folder) if (folder / MANIFEST).is_file() else None, 0
    while record is not None:
        stage = record.stage
        if stage["stage"] == "train":
            if stage.get("max_steps") is None:
                raise ValueError(f"{folder.name} was trained for epochs: the forecast needs max_steps")
            pairs += stage["max_steps"] * stage["global_batch_size"]
        before = folder.parent / str(stage.get("model"))
        record = Record.read(before) if (before / MANIFEST).is_file() else None
    if not pairs:
        raise ValueError(f"{folder}: no record says how long it was trained. The forecast is for models of this run")
    return pairs
