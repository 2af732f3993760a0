"""Rows that show the best of others for each task: what routing could gain at most, since choosing needs the answers.

- {stage: lab.cards.oracles:OracleStage, models: {a: …, b: …}, oracles: {best: [a, b]}, tasks: […]}
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.evaluation.report import write_report
from clip_moe.evaluation.results import write_result
from clip_moe.evaluation.stages.evaluate import EvaluateStage


@dataclass(config=STRICT, kw_only=True)
class OracleStage(EvaluateStage):
    """An `evaluate` stage with more rows, each the best of some models."""

    # Row title -> the models it shows the best score of.
    oracles: dict[str, list[str]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_oracles(self):
        for title, rows in self.oracles.items():
            if not rows or not set(rows) <= set(self.models) or title in self.models:
                raise ValueError(f"oracles.{title} needs a title of its own and some of the models, not {rows}")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        super().run(inputs, context, directory)
        if context.accelerator.is_main_process:
            results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob("*--*.json"))]
            best = [result for title, rows in self.oracles.items() for result in best_of(results, title, rows)]
            for result in best:
                write_result(result, directory)
            print(write_report(results + best, directory, self.baseline))


def best_of(results: Sequence[dict[str, Any]], title: str, models: Sequence[str]) -> list[dict[str, Any]]:
    """One result a task, named `title`, with the best score of these models in each metric. The mean of several tasks
    is that of the best scores."""
    best = {}
    for result in results:
        if result["model"] in models:
            # It is no model's, so nobody may find it by the hash of one.
            result = {key: value for key, value in result.items() if key != "weights"}
            other = best.setdefault(
                result["task"], {**result, "model": title, "source": f"best of {', '.join(models)}"}
            )
            scores = {name: max(other["metrics"][name], value) for name, value in result["metrics"].items()}
            parts = [value for name, value in scores.items() if name.startswith("accuracy/")]
            if parts:
                scores["accuracy"] = sum(parts) / len(parts)
            best[result["task"]] = {**other, "metrics": scores}
    return list(best.values())
