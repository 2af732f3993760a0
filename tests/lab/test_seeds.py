"""Mean and spread over seeds, what was learned against what was kept, and bits against parameters: by hand."""

import json

import pytest
import small_evaluation
from test_report import cells, lines_of, result
from transformers import CLIPConfig

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_config
from clip_moe.engine.provenance import Record
from lab.cards.knowledge import Knowledge, equal_dense, read_knowledge, write_knowledge
from lab.cards.seeds import write_seeds
from lab.cards.tradeoff import above_line, write_tradeoff

figures = small_evaluation.figures


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


def test_mean_and_deviation(folders, tmp_path, figures, capsys):
    write_seeds.main([*map(str, folders), "--output_dir", str(tmp_path / "out"), "--baseline", "dense"])
    table = capsys.readouterr().out
    assert lines_of(table)[2:] == [["sparse", "63.0 ± 3.6 (+12.0 ± 6.6)"], ["dense", "51.0 ± 1.0"]]
    text = (tmp_path / "out" / "seeds.md").read_text()
    assert table in text and "3 seeds" in text and "1,000 images" in text and "Commit abc" in text
    scores = json.loads((tmp_path / "out" / "seeds.json").read_text())
    assert [metrics["recall"] for metrics in scores["sparse"]["retrieval"]] == [0.60, 0.62, 0.67]
    page = (tmp_path / "out" / "seeds.html").read_text(encoding="utf-8")
    assert cells(page)[3] == ("63.0 ± 3.6 (+12.0 ± 6.6)", "better") and 'alt="mean and spread"' in page
    sparse, dense = figures[0].axes[0].collections[0].get_segments()  # error bars
    assert dense[:, 0] == pytest.approx([50, 52])
    assert sparse[:, 0] == pytest.approx([63 - 3.6056, 63 + 3.6056], abs=1e-3)
    write_seeds(folders[:2], tmp_path / "out", baseline="dense")
    assert cells((tmp_path / "out" / "seeds.html").read_text())[3] == ("61.0 ± 1.4 (+10.5 ± 6.4)", "better")
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


def test_knowledge(tmp_path):
    """A dense model, twice, and a sparse one: bits and parameters, and the page of both."""
    width, layers = 8, 2
    tower = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 1}
    tower |= {"num_hidden_layers": layers}
    dense = CLIPConfig(text_config=tower, vision_config=tower | {"image_size": 16, "patch_size": 8})
    folders = [tmp_path / "run 0", tmp_path / "run 1"]
    for folder, share in zip(folders, (0.5, 0.7), strict=True):
        folder.mkdir()
        for name, config, told in (("dense", dense, share), ("sparse", sparse_config(dense, PRESETS["clip_up"]), 0.9)):
            config.save_pretrained(tmp_path / name)
            metrics = {"image_to_text_information": told - 0.1, "text_to_image_information": told + 0.1}
            content = {"num_samples": 256, "source": str(tmp_path / name), "metrics": metrics}
            write(folder, result(name, "names_256", **content, primary=dict.fromkeys(metrics, "information")))
    of_dense, sparse = read_knowledge(folders)
    of_layer = 4 * (width * width + width) + 2 * 2 * width
    of_ffn = 2 * 4 * width * width + 5 * width
    assert (of_dense.model, of_dense.experts, of_dense.runs) == ("dense", 0, 2)
    assert of_dense.parameters == of_dense.activated == 2 * layers * (of_layer + of_ffn)
    # Without the country
    assert of_dense.share == pytest.approx(0.6) and of_dense.bits == pytest.approx(256 * (0.6 * 8 - 3))
    # Every second layer of both towers is sparse, and routers of CLIP-UP have no bias
    assert sparse.experts == 8 and sparse.parameters == of_dense.parameters + 2 * (7 * of_ffn + 8 * width)
    assert sparse.activated == sparse.parameters - 2 * 6 * of_ffn
    table = write_knowledge(folders, tmp_path / "page")
    assert table in (tmp_path / "page" / "knowledge.md").read_text()
    rows = json.loads((tmp_path / "page" / "knowledge.json").read_text())
    assert [row["share"] for row in rows] == [pytest.approx(0.6), pytest.approx(0.9)]
    assert f"{256 * 5 / rows[0]['parameters']:.2f}" in table


def test_dense_model_that_remembers_as_much():
    def dense(size, share, names=256):
        return Knowledge("dense", f"names_{names}", names, 0, size, size, share, 1)

    curve = [dense(100, 0.5), dense(1600, 0.875)]
    sparse = Knowledge("sparse", "names_256", 256, 8, 4000, 1000, 0.625, 1)
    assert equal_dense(sparse, curve) == pytest.approx(400)  # 1, 2 and 4 bits: half way, of the logarithms
    # As large, with another learning rate; of another task; that knows nothing
    others = [dense(1600, 0.4), dense(200, 0.2, 1024), dense(50, 0.0)]
    assert equal_dense(sparse, [*curve, *others]) == pytest.approx(400)
    assert equal_dense(Knowledge("sparse", "names_256", 256, 8, 4000, 1000, 0.9, 1), curve) is None
