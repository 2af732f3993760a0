"""Results of the same models with several seeds: mean and spread.

    python -m lab.cards.seeds runs/seed_*/evaluation --output_dir model_cards/clip_moe_symbols --baseline dense

Every folder holds the results of one run, as a recipe's evaluate stage writes them. OUTPUT_DIR gets `seeds.md`, with
the mean and the sample standard deviation of the main scores and how long each run took, the same scores as a chart,
`seeds.svg`, both in one HTML page, `seeds.html`, and `seeds.json`, with all scores of every seed. Runs in which the
training of a model did not leave chance, or collapsed, are counted and left out.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.intervals import LEVEL
from clip_moe.engine.markdown import escape, item, markdown_table
from clip_moe.engine.messages import join_names
from clip_moe.engine.provenance import MANIFEST, Record, trainings
from clip_moe.evaluation.page import write_page
from clip_moe.evaluation.report import SAME_FOR_TASK, Score, arrange, differ, draw_scores, primary_columns
from clip_moe.evaluation.results import computed_with
from lab.cards.intervals import with_interval

# Runs must agree in these for each model and task: else their spread is not the seed's alone. Test pictures are the
# seed's, as a recipe measures.
SAME_FOR_SEEDS = (*SAME_FOR_TASK, "dtype", "changes", "batch_size", "device", "commit", "versions")

Table = dict[str, dict[str, dict]]


@command
def write_seeds(folders: Sequence[Path], /, output_dir: Folder, baseline: str | None = None) -> str:
    """Write `seeds.md`, `seeds.svg`, `seeds.html` and `seeds.json`.

    Args:
        folders: with one result a model and task, `TASK--MODEL.json`.
        baseline: the model whose score of the same seed is subtracted from the others' before the mean, in brackets.

    Returns:
        The table of the primary metrics: a row a model, in percent.
    """
    tables = [_read(folder) for folder in folders]
    first = tables[0]
    for folder, table in zip(folders[1:], tables[1:], strict=True):
        _require_comparable(first, table, folders[0], folder)
    _require_different_weights(tables, folders)
    _require_different_seeds(folders)
    deaths = [_deaths(folder, table) for folder, table in zip(folders, tables, strict=True)]
    alive = [number for number, death in enumerate(deaths) if not death]
    left_out = "; ".join(f"run {number}: {death}" for number, death in enumerate(deaths) if death)
    if left_out and len(alive) < 2:
        raise ValueError(f"a spread needs two runs whose models all learned ({left_out}): run others, or drop a model")
    tables = [tables[number] for number in alive]
    if baseline is not None and baseline not in first:
        raise ValueError(f"the baseline {baseline!r} has no results, only {', '.join(first)}")
    results = next(iter(first.values()))
    columns = primary_columns(results)
    rows = [[model, *(_cell(tables, model, *column, baseline) for column in columns)] for model in first]
    table = markdown_table(["model", *columns.values()], rows)
    about = [f"Mean ± sample standard deviation of {len(tables)} seeds, in percent."]
    if left_out:
        about.append(f"{len(folders) - len(alive)} of {len(folders)} runs left out ({escape(left_out)}).")
    if baseline is not None:
        about.append(
            f"In brackets: the mean difference to {escape(baseline)}, ± its paired {LEVEL:.0%} interval over the "
            "seeds, each alone."
        )
    protocols = [item(f"{task}: {result['protocol']}") for task, result in results.items()]
    made_with = escape(computed_with(next(iter(results.values()))))
    took = [(number, _took(folders[number])) for number in alive]
    sections = [
        *about,
        table,
        "![mean and spread](seeds.svg)",
        "\n".join(protocols),
        f"{made_with[0].upper()}{made_with[1:]}.",
        "\n".join(item(f"Run {number}: {text}") for number, text in took if text),
    ]
    scores = {
        model: {task: [table[model][task]["metrics"] for table in tables] for task in first[model]} for model in first
    }
    pictures = {"seeds.svg": lambda path: _draw(tables, columns, path)}
    write_page(output_dir / "seeds", "\n\n".join(filter(None, sections)), pictures, scores)
    return table


def _read(folder: Path) -> Table:
    """The results in a folder, in the order in which they were measured, which is the recipe's."""
    files = sorted(folder.glob("*--*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        raise ValueError(f"{folder} holds no results of an evaluation")
    table = arrange(files)
    require_whole(table)
    return table


def _deaths(folder: Path, table: Table) -> str:
    """The models in a run whose training did not leave chance or collapsed; empty where no record says so."""
    models = Record.read(folder).stage.get("models", {}) if (folder / MANIFEST).is_file() else {}
    ends = {row: trainings(folder.parent / name).values() for row, name in models.items() if row in table}
    return ", ".join(f"{row} {end.outcome}" for row, row_ends in ends.items() for end in row_ends if end.is_dead)


def _draw(tables: Sequence[Table], columns: dict[tuple[str, str], str], path: Path) -> None:
    """A dot for each mean, and an error bar for its deviation."""

    def score(model: str, column: tuple[str, str]) -> Score:
        values = _values(tables, model, *column)
        return Score(statistics.mean(values), (statistics.stdev(values),) * 2)

    scores = {title: {model: score(model, column) for model in tables[0]} for column, title in columns.items()}
    draw_scores(scores, list(tables[0]), path)


def _values(tables: Sequence[Table], model: str, task: str, metric: str) -> list[float]:
    """A score in every seed."""
    return [table[model][task]["metrics"][metric] for table in tables]


def _cell(tables: Sequence[Table], model: str, task: str, metric: str, baseline: str | None) -> str:
    values = [100 * value for value in _values(tables, model, task, metric)]
    cell = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
    if baseline in (None, model):
        return cell
    others = _values(tables, baseline, task, metric)
    differences = [value - 100 * other for value, other in zip(values, others, strict=True)]
    return f"{cell} ({with_interval(differences)})"


def _require_comparable(first: Table, other: Table, folder: Path, other_folder: Path) -> None:
    if {m: set(row) for m, row in first.items()} != {m: set(row) for m, row in other.items()}:
        raise ValueError(f"{folder} and {other_folder} hold results of different models or tasks")
    for model, row in first.items():
        for task, result in row.items():
            for key in SAME_FOR_SEEDS:
                if differ(_without_seed(result), _without_seed(other[model][task]), key):
                    raise ValueError(
                        f"{task} of {model!r}: {key} is {result.get(key)!r} in {folder} but "
                        f"{other[model][task].get(key)!r} in {other_folder}; such scores cannot be averaged"
                    )


def _require_different_weights(tables: Sequence[Table], folders: Sequence[Path]) -> None:
    """A model has other weights in each run, or, as a base, one weights in all. Results without weights are the best of
    several models."""
    numbers = set()
    for model in tables[0]:
        weights = [str(next(iter(table[model].values())).get("weights")) for table in tables]
        numbers.add(len(set(weights)))
        if 1 < len(set(weights)) < len(weights):
            same = [str(folder) for folder, digest in zip(folders, weights, strict=True) if weights.count(digest) > 1]
            raise ValueError(
                f"{model!r} has the same weights in {' and '.join(same)}, but not in all: are there copies?"
            )
    if numbers == {1} and "weights" in next(iter(next(iter(tables[0].values())).values())):
        raise ValueError(
            f"all results are of the same weights: a spread needs runs of different seeds, not {folders[0]}"
        )


def _require_different_seeds(folders: Sequence[Path]) -> None:
    """As far as there are records, runs have seeds of their own and train each model alike."""
    folder_of_seed, first_of_row = {}, {}
    for folder in (folder for folder in folders if (folder / MANIFEST).is_file()):
        record = Record.read(folder)
        if (other := folder_of_seed.setdefault(record.seed, folder)) is not folder:
            raise ValueError(f"{other} and {folder} are of one seed, {record.seed}: a spread needs a seed each")
        for row, name in record.stage.get("models", {}).items():
            if (model := folder.parent / name).joinpath(MANIFEST).is_file():
                settings = _without_seeds(Record.read(model).stage)
                other, expected = first_of_row.setdefault(row, (model, settings))
                if changed := [key for key in settings | expected if settings.get(key) != expected.get(key)]:
                    raise ValueError(
                        f"{other} and {model} differ in more than the seed, in {join_names(changed)}: such scores "
                        "cannot be averaged"
                    )


def require_whole(table: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Raises a ValueError if a model of `arrange` lacks a task."""
    tasks = {task for row in table.values() for task in row}
    for model, row in table.items():
        missing = sorted(tasks - set(row))
        if missing:
            raise ValueError(
                f"{model!r} has no result on {', '.join(missing)}: measure it, or leave out these tasks or this model"
            )


def _without_seed(result: dict[str, Any]) -> dict[str, Any]:
    """The result without the seed that drew the pictures of its task."""
    data = result.get("data") or {}
    return result | {"data": {key: value for key, value in data.items() if key != "seed"}}


def _without_seeds(settings: Any) -> Any:
    """Settings without the seeds that a recipe hands on to its data and tasks."""
    if isinstance(settings, dict):
        return {key: _without_seeds(value) for key, value in settings.items() if key not in ("seed", "test_seed")}
    return list(map(_without_seeds, settings)) if isinstance(settings, list) else settings


def _took(folder: Path) -> str | None:
    """How long the run of this folder took, on what, and at which commits; None: it was not recorded."""
    manifests = sorted(folder.parent.glob(f"*/{MANIFEST}"))
    attempts = [attempt for manifest in manifests for attempt in Record.read(manifest.parent).attempts]
    if not attempts:
        return None
    minutes = sum(attempt.seconds or 0 for attempt in attempts) / 60
    hardware = sorted({f"{attempt.num_processes} x {attempt.device}" for attempt in attempts})
    commits = sorted({str(attempt.commit) for attempt in attempts})
    return f"{minutes:.0f} minutes on {', '.join(hardware)}, commit {', '.join(commits)}"


if __name__ == "__main__":
    write_seeds.main()
