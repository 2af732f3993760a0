"""Mean and spread over seeds, and learned against kept: by hand."""

import json
import types

import pytest
from test_outcome import ALIVE, DEAD
from test_report import cells, lines_of, result

from clip_moe.conversion.publishing.card import _stage_row
from clip_moe.engine.provenance import Record
from clip_moe.evaluation.task import INFORMATION
from lab.cards.oracles import OracleStage, best_of
from lab.cards.seeds import write_seeds
from lab.cards.tradeoff import above_line, write_tradeoff
from lab.law.points import read_points
from lab.law.stage import EstimateStage


@pytest.fixture
def folders(tmp_path):
    """Three runs: the dense model has 50, 51 and 52 %, the sparse one 60, 62 and 67."""
    folders = [tmp_path / f"seed {number}" for number in range(3)]
    for number, value in enumerate((0.60, 0.62, 0.67)):
        folders[number].mkdir()
        write(folders[number], result("sparse", value=value))
        write(folders[number], result("dense", value=0.5 + 0.01 * number))
    return folders


def write(folder, content):
    (folder / f"{content['task']}--{content['model']}.json").write_text(json.dumps(content))


def test_mean_and_deviation(folders, tmp_path, capsys):
    write_seeds.main([*map(str, folders), "--output_dir", str(tmp_path / "out"), "--baseline", "dense"])
    table = capsys.readouterr().out
    assert lines_of(table)[2:] == [["sparse", "63.0 ± 3.6 (+12.0 ± 6.6)"], ["dense", "51.0 ± 1.0"]]
    text = (tmp_path / "out" / "seeds.md").read_text()
    assert table in text and "3 seeds" in text and "1,000 images" in text and "Commit abc" in text
    scores = json.loads((tmp_path / "out" / "seeds.json").read_text())
    assert [metrics["recall"] for metrics in scores["sparse"]["retrieval"]] == [0.60, 0.62, 0.67]
    page = (tmp_path / "out" / "seeds.html").read_text(encoding="utf-8")
    assert cells(page)[3] == ("63.0 ± 3.6 (+12.0 ± 6.6)", "better") and 'alt="mean and spread"' in page
    write(folders[1], result("sparse", value=0.8))
    write_seeds(folders[:2], tmp_path / "out", baseline="dense")
    assert cells((tmp_path / "out" / "seeds.html").read_text())[3][1] == ""  # ± more than the difference


def test_each_seed_has_test_pictures_of_its_own(folders, tmp_path):
    for number, folder in enumerate(folders):
        for model, value in (("sparse", 0.6 + number / 100), ("dense", 0.5)):
            write(folder, result(model, value=value, data={"seed": number} if number else {}))
    assert "61.0 ± 1.0" in write_seeds(folders, tmp_path / "out")
    write(folders[1], result("dense", value=0.5, data={"seed": 2}))
    with pytest.raises(ValueError, match="such scores cannot be compared"):
        write_seeds(folders, tmp_path / "out")


SAME = {"data": {"split": "test"}, "num_captions": 4, "batch_size": 8}
CHANGES = [{"num_samples": 10}, {"commit": "def"}, {"data": {"split": "train"}}, {"changes": {"a": "b"}}]


@pytest.mark.parametrize("change", [*CHANGES, {"batch_size": 9, "depends_on_batch": True}])
def test_runs_that_differ_in_more_than_the_seed(folders, tmp_path, change):
    for folder in folders:
        for model in ("sparse", "dense"):
            write(folder, result(model, **SAME | (change if folder == folders[2] else {})))
    with pytest.raises(ValueError, match=rf"{next(iter(change))} is .* in .* but .* in .*; such scores cannot be"):
        write_seeds(folders, tmp_path / "out")
    write(folders[1], result("other"))
    with pytest.raises(ValueError, match="results of different models or tasks"):
        write_seeds(folders[:2], tmp_path / "out")


def test_a_copy_of_a_run_is_no_other_seed(folders, tmp_path):
    """The dense model has the same weights in all runs."""
    for number, folder in enumerate(folders):
        write(folder, result("dense", weights="dense"))
        write(folder, result("sparse", weights=f"{number}"))
    write_seeds(folders, tmp_path / "out")
    write(folders[2], result("sparse", weights="0"))
    with pytest.raises(ValueError, match="'sparse' has the same weights in .*seed 0 and .*seed 2, but not in all"):
        write_seeds(folders, tmp_path / "other")
    with pytest.raises(ValueError, match="all results are of the same weights: a spread needs runs of different"):
        write_seeds([folders[0], folders[2]], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_runs_of_one_seed_or_of_other_training_are_no_spread(folders, tmp_path):
    def record(number, seed, **settings):
        evaluation = folders[number]
        Record(stage={"models": {"sparse": f"{evaluation.name} sparse"}}, seed=seed).write(evaluation)
        made = tmp_path / f"{evaluation.name} sparse"
        made.mkdir(exist_ok=True)
        Record(stage={"stage": "train", **settings}, seed=seed).write(made)

    for number in range(3):
        record(number, number)
    assert "63.0 ± 3.6" in write_seeds(folders, tmp_path / "out")
    record(2, 0)
    with pytest.raises(ValueError, match="seed 0 and .*seed 2 are of one seed, 0: a spread needs a seed each"):
        write_seeds(folders, tmp_path / "out")
    record(2, 2, max_steps=3)
    with pytest.raises(ValueError, match="differ in more than the seed, in max_steps: such scores cannot"):
        write_seeds(folders, tmp_path / "out")


LINE = [(90, 0), (80, 20), (40, 60), (0, 50)]  # kept, learned


@pytest.mark.parametrize(
    ("point", "line", "above"),
    [
        ((85, 10), LINE, 0),  # on it
        ((60, 60), LINE, 20),  # between two of its points, 40
        ((20, 55), LINE, -5),  # where it learned less for forgetting more, what kept more counts
        ((95, 5), LINE, 5),  # nothing on it keeps so much: the base, which learned nothing
        ((50, 30), [(60, 0), (40, 10), (55, 40)], -10),  # it comes back
    ],
)
def test_above_a_line(point, line, above):
    assert above_line(point, line) == pytest.approx(above)


def test_tradeoff(tmp_path):
    """A base, a line of three points, in any order, and a model that is 5, 6 and 7 points above it."""

    def of(*scores):
        return [{"image_to_text_recall@1": one / 100, "text_to_image_recall@1": one / 100} for one in scores]

    models = {
        "dense, 100 %": (of(60, 60, 60), of(20, 20, 20)),
        "base": (of(0, 0, 0), of(100, 100, 100)),
        "sparse": (of(45, 46, 47), of(80, 80, 80)),
        "dense, 50 %": (of(40, 40, 40), of(80, 80, 80)),
    }
    scores = {model: {"learned": learned, "kept": kept} for model, (learned, kept) in models.items()}
    (tmp_path / "seeds.json").write_text(json.dumps(scores))
    table = write_tradeoff(tmp_path, "learned", "kept", "base")
    assert lines_of(table)[0] == ["model", "learned", "kept", "above dense"]
    assert lines_of(table)[2:] == [
        ["dense, 100 %", "60.0 ± 0.0", "20.0 ± 0.0", ""],
        ["base", "0.0 ± 0.0", "100.0 ± 0.0", ""],
        ["sparse", "46.0 ± 1.0", "80.0 ± 0.0", "+6.0 ± 2.5"],  # t = 4.30 of 1 / sqrt(3)
    ]
    assert table in (tmp_path / "tradeoff.md").read_text() and (tmp_path / "tradeoff.png").stat().st_size > 10_000


def test_an_oracle_has_the_best_score_of_each_topic():
    """It is no model's: who looks for scores by the hash of weights must not find it."""
    metrics = {"a": {"accuracy/planet": 0.2, "accuracy/die": 0.8}, "b": {"accuracy/planet": 0.5, "accuracy/die": 0.3}}
    results = [result(name, weights=name, metrics={"accuracy": 0.5} | parts) for name, parts in metrics.items()]
    (best,) = best_of(results, "best", ["a", "b"])
    assert best["metrics"] == {"accuracy": pytest.approx(0.65), "accuracy/planet": 0.5, "accuracy/die": 0.8}
    assert best["model"] == "best" and "weights" not in best
    with pytest.raises(ValueError, match="oracles.best needs a title of its own and some of the models, not .'c'"):
        settings = {"stage": "lab.cards.oracles:OracleStage", "name": "scores", "tasks": ["symbols_pairs"]}
        OracleStage(**settings, models={"a": "a"}, oracles={"best": ["c"]})


# --- models that died in training are no seed, no point of the law and no side of a verdict


def test_a_dead_run_is_no_seed(folders, tmp_path):
    """Each run's evaluation lies in a folder beside its stages."""
    runs = []
    for number, folder in enumerate(folders):
        runs.append(folder.rename(tmp_path / f"run {number}").joinpath("scores"))
        runs[-1].mkdir()
        for file in runs[-1].parent.glob("*.json"):
            file.rename(runs[-1] / file.name)
        models = {"sparse": "tuned", "dense": "base"}
        Record(stage={"stage": "evaluate", "models": models}, seed=number).write(runs[-1])
        (runs[-1].parent / "tuned").mkdir()
        Record(stage={"stage": "train"}, training=DEAD if number == 1 else ALIVE).write(runs[-1].parent / "tuned")
    table = write_seeds(runs, tmp_path / "out", baseline="dense")
    assert "63.5 ± 4.9" in table  # 60 and 67
    page = (tmp_path / "out" / "seeds.md").read_text()
    assert "1 of 3 runs left out (run 1: sparse did not leave chance)." in page and "of 2 seeds" in page
    assert len(json.loads((tmp_path / "out" / "seeds.json").read_text())["dense"]["retrieval"]) == 2
    with pytest.raises(ValueError, match="two runs whose models all learned .run 1: sparse did not leave chance."):
        write_seeds(runs[:2], tmp_path / "other")


def test_a_dead_run_is_no_point_of_the_law(tmp_path):
    for stage in ("dense", "dense_score"):
        (tmp_path / stage).mkdir()
    write(tmp_path / "dense_score", result("dense"))
    Record(stage={"stage": "train"}, training=DEAD).write(tmp_path / "dense")
    assert read_points(tmp_path) == []
    Record(stage={"stage": "train"}, training=ALIVE).write(tmp_path / "dense")
    with pytest.raises(FileNotFoundError, match="seed_model"):  # it goes on, to a model that is not there
        read_points(tmp_path)


def test_a_dead_model_has_no_place_in_other_pages(tmp_path):
    """No verdict beside the law's estimate, and its card says so."""
    for name, training in (("dense", ALIVE), ("sparse", DEAD)):
        (tmp_path / name).mkdir()
        stage = {"stage": "train", "data": {"source": "symbols", "num_samples": 16}}
        Record(stage=stage, training=training).write(tmp_path / name)
    results = [result(row, "symbols", metrics=dict.fromkeys(INFORMATION, 0.5)) for row in ("dense", "sparse")]
    assert _stage_row(Record.read(tmp_path / "sparse"))[1].endswith("did not leave chance")
    models = {"dense": "dense", "sparse": "sparse"}
    stage = EstimateStage(name="both", stage="estimate", models=models, tasks=["names_256"])
    inputs = types.SimpleNamespace(models={row: str(tmp_path / row) for row in models}, estimate="")
    assert "*Measured*: no verdict, as sparse did not leave chance." in stage.head(results, inputs, tmp_path, "cpu")[0]
