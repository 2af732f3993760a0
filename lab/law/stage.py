"""The stage that reports the law's estimate beside the measurement."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.provenance import MANIFEST, Record, trainings
from clip_moe.engine.settings import STRICT
from clip_moe.evaluation.stages.evaluate import EvaluateStage

if TYPE_CHECKING:
    from clip_moe.data.arguments import DataArguments
    from clip_moe.evaluation.task import Task

DENSE, SPARSE = ROWS = ("dense", "sparse")


@dataclass(config=STRICT, kw_only=True)
class EstimateStage(EvaluateStage):
    """An `evaluate` stage whose report begins with the law's estimate for a dense and a sparse model, from their
    captions and the length of their training alone, beside the measurement.

    It compares the rows `dense` and `sparse`, made by `train` stages with `max_steps` and the same data. The first task
    counts: retrieval among pictures of these captions.
    """

    kind: ClassVar[str] = "estimate"

    # The row that the other is compared with.
    baseline: str | None = DENSE

    @model_validator(mode="after")
    def _check_rows(self):
        if missing := [row for row in ROWS if row not in self.models]:
            raise ValueError(f"models needs the rows dense and sparse, and has no {', '.join(missing)}")
        return self

    def tasks_of(self, inputs: SimpleNamespace) -> "dict[str, Task]":
        from clip_moe.evaluation.task import INFORMATION

        tasks = super().tasks_of(inputs)
        name, first = next(iter(tasks.items()))
        if first.kind != "retrieval":
            raise ValueError(f"{self.name}.tasks: the first is {first.kind}; the law is of retrieval")
        return tasks | {name: dataclasses.replace(first, metrics=list(dict.fromkeys([*first.primary, *INFORMATION])))}

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        inputs.estimate = self._estimate(inputs)  # before anything is measured
        super().run(inputs, context, directory)

    def _estimate(self, inputs: SimpleNamespace) -> str:
        from clip_moe.conversion.checkpoints import load_clip_config
        from lab.law.estimate import CAVEAT, count_captions, estimate, trained_model, unmeasured_experts
        from lab.law.law import fitted_law
        from modeling_clip_moe.families import sparse_towers

        folders = {row: Path(inputs.models[row]) for row in ROWS}
        data = data_of(folders[DENSE])
        if data != data_of(folders[SPARSE]):
            raise ValueError(f"{self.name}.models: dense and sparse were trained on different data")
        counted = count_captions(data, [str(folder) for folder in folders.values()])
        facts = fitted_law()[0].facts(counted.different, data.source)
        configs = {row: load_clip_config(str(folder)) for row, folder in folders.items()}
        for row, config in configs.items():
            if bool(sparse_towers(config)) != (row == SPARSE):
                raise ValueError(f"{self.name}.models: {row} is {'' if sparse_towers(config) else 'not '}sparse")
        shown = {row: pairs_shown(folder) / counted.different for row, folder in folders.items()}
        estimated = estimate(facts, *(trained_model(configs[row], shown[row]) for row in ROWS))
        if outside := [*unmeasured_experts(configs[SPARSE]), *estimated.outside]:
            sentence = f"no verdict. {'; '.join(outside)}."
        else:
            sentence = f"{estimated.sentence} {CAVEAT}"
        return f"{counted.sentence}\n\n*Estimated*, with experts: {sentence}"

    def head(
        self, results: list[dict[str, Any]], inputs: SimpleNamespace, directory: Path, device: Any
    ) -> tuple[str, dict]:
        from clip_moe.evaluation.task import INFORMATION
        from lab.law.law import known_share

        source, shares = data_of(Path(inputs.models[DENSE])).source, {}
        for row in ROWS:
            result = next(result for result in results if result["model"] == row)
            information = sum(result["metrics"][way] for way in INFORMATION) / len(INFORMATION)
            shares[row] = known_share(information, result["num_samples"], source)
        measured = (
            f"*Measured*, on {result['num_samples']:,} pictures: {shares[SPARSE]:.0%} instead of {shares[DENSE]:.0%}, "
            f"{100 * (shares[SPARSE] - shares[DENSE]):+.1f} points."
        )
        ends = {row: trainings(Path(inputs.models[row])).values() for row in ROWS}
        if dead := [f"{row} {end.outcome}" for row, row_ends in ends.items() for end in row_ends if end.is_dead]:
            measured = f"*Measured*: no verdict, as {' and '.join(dead)}."
        head, pictures = super().head(results, inputs, directory, device)
        return "\n\n".join(filter(None, [inputs.estimate, measured, head])), pictures


def data_of(folder: Path) -> "DataArguments":
    """Training data of a model; a stage that made them is the folder beside the model's."""
    from clip_moe.data.arguments import DataArguments

    record = _record(folder)
    data = DataArguments(**record.stage["data"])
    beside = folder.parent / data.source
    data.source = str(beside) if (beside / MANIFEST).is_file() else data.source
    return data


def pairs_shown(folder: Path) -> int:
    """Pairs that a model was trained on, with those of the models that it began with.

    Raises:
        ValueError: it was trained for epochs, or by another kind of stage; or a model that it began with is gone.
    """
    pairs, seen = 0, set()
    while True:
        if folder.resolve() in seen:
            raise ValueError(f"{folder}: its record says that it began with itself")
        seen.add(folder.resolve())
        stage = _record(folder).stage
        if stage["stage"] == "train":
            if stage.get("max_steps") is None:
                raise ValueError(f"{folder} was trained for epochs: the estimate needs max_steps")
            pairs += stage["max_steps"] * stage["global_batch_size"]
        elif stage["stage"] not in ("upcycle", "initialize"):
            raise ValueError(f"{folder} is of a stage {stage['stage']}: the estimate is for train and upcycle stages")
        if stage["stage"] == "initialize":
            return pairs
        beside = folder.parent / stage["model"]  # a stage, or else a folder as the command had it
        folder = beside if beside.is_dir() and beside.resolve() not in seen else Path(stage["model"])


def _record(folder: Path) -> Record:
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} has no record of its training. The estimate is for models that train stages made")
    return Record.read(folder)
