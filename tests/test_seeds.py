"""Mean and spread over seeds, by hand."""

import json

import pytest
from test_report import result

from evaluation.seeds import main, write_seeds
from records.provenance import Record


@pytest.fixture
def folders(tmp_path):
    """Three runs: the dense model always has 50 %, the sparse one 60, 62 and 67."""
    folders = []
    for number, value in enumerate((0.60, 0.62, 0.67)):
        folder = tmp_path / f"seed {number}"
        folder.mkdir()
        for model, score in (("sparse", value), ("dense", 0.5)):
            write(folder, result(model, value=score))
        folders.append(folder)
    return folders


def write(folder, content):
    (folder / f"{content['task']}--{content['model']}.json").write_text(json.dumps(content))


def test_mean_and_deviation(folders, tmp_path):
    for folder in folders:  # the baseline moves with the seed
        write(folder, result("dense", value=0.5 + 0.01 * folders.index(folder)))
    table = write_seeds(folders, tmp_path / "out", baseline="dense")
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.splitlines()[2:]}
    assert rows == {"sparse": "63.0 ± 3.6 (+12.0 ± 6.6)", "dense": "51.0 ± 1.0"}
    text = (tmp_path / "out" / "seeds.md").read_text()
    assert table in text and "3 seeds" in text and "1,000 images" in text and "Commit abc" in text
    scores = json.loads((tmp_path / "out" / "seeds.json").read_text())
    assert [metrics["recall"] for metrics in scores["sparse"]["retrieval"]] == [0.60, 0.62, 0.67]
    assert list(rows) == list(scores)


def test_each_seed_has_test_pictures_of_its_own(folders, tmp_path):
    for number, folder in enumerate(folders):
        for model, value in (("sparse", 0.6 + number / 100), ("dense", 0.5)):
            write(folder, result(model, value=value, data={"seed": number} if number else {}))
    assert "61.0 ± 1.0" in write_seeds(folders, tmp_path / "out")
    write(folders[1], result("dense", value=0.5, data={"seed": 2}))
    with pytest.raises(ValueError, match="such scores cannot be compared"):
        write_seeds(folders, tmp_path / "out")


def test_command(folders, tmp_path, capsys):
    main([*map(str, folders), "--output-dir", str(tmp_path / "out")])
    assert "63.0 ± 3.6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (result("other"), "results of different models or tasks"),
        (result("sparse", "pairs"), "'dense' has no result on pairs"),
        (result("sparse", protocol="all images"), "'dense' but 'all images' for 'sparse'"),
    ],
)
def test_what_cannot_be_averaged(folders, tmp_path, content, message):
    write(folders[1], content)
    with pytest.raises(ValueError, match=message):
        write_seeds(folders, tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"num_samples": 10},
        {"commit": "def"},
        {"dtype": "bfloat16"},
        {"versions": {"torch": "3"}},
        {"data": {"split": "train"}},
        {"num_captions": 5},
        {"batch_size": 9, "depends_on_batch": True},
    ],
)
def test_runs_that_differ_in_more_than_the_seed(folders, tmp_path, change):
    same = {"data": {"split": "test"}, "num_captions": 4, "batch_size": 8}  # which results of earlier versions lack
    for folder in folders:
        for model in ("sparse", "dense"):
            write(folder, result(model, **same))
    for model in ("sparse", "dense"):
        write(folders[2], result(model, **same | change))
    with pytest.raises(ValueError, match=rf"{next(iter(change))} is .* in .* but .* in .*; such scores cannot be"):
        write_seeds(folders, tmp_path / "out")


def test_a_copy_of_a_run_is_no_other_seed(folders, tmp_path):
    """The dense model has the same weights in all runs."""
    for number, folder in enumerate(folders):
        write(folder, result("dense", weights="dense"))
        write(folder, result("sparse", weights=f"sparse {number}"))
    write_seeds(folders, tmp_path / "out")
    write(folders[2], result("sparse", weights="sparse 0"))
    with pytest.raises(ValueError, match="seed 2 and .*seed 0 hold results of the same weights: a spread needs runs"):
        write_seeds(folders, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_model_with_one_weights_in_two_of_three_runs(folders, tmp_path):
    for number, folder in enumerate(folders):
        write(folder, result("dense", weights=f"dense {number}"))
        write(folder, result("sparse", weights=f"sparse {number // 2}"))
    with pytest.raises(ValueError, match="'sparse' has the same weights in .*seed 0 and .*seed 1, but not in all"):
        write_seeds(folders, tmp_path / "out")


def test_changes_are_not_averaged_with_none(folders, tmp_path):
    write(folders[1], result("sparse", changes={"routing": "paper"}))
    with pytest.raises(ValueError, match="changes is None in .*seed 0 but {'routing': 'paper'} in .*seed 1"):
        write_seeds(folders, tmp_path / "out")


def test_how_long_the_runs_took(tmp_path):
    """Of all stages of the runs whose evaluation is given, where that was recorded."""
    folders = [tmp_path / f"run {number}" / "evaluation" for number in range(2)]
    attempt = {"device": "cpu", "num_processes": 1, "versions": {}}
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        write(folder, result("sparse", value=0.5 + 0.1 * number))
    for stage, seconds in (("dense", [90, None]), ("evaluation", [210])):
        (folders[1].parent / stage).mkdir(exist_ok=True)
        attempts = [{**attempt, "commit": stage[0], "seconds": number} for number in seconds]
        Record(stage={}, attempts=attempts).write(folders[1].parent / stage)
    write_seeds(folders, tmp_path / "out")
    text = (tmp_path / "out" / "seeds.md").read_text()
    assert text.endswith("\n\n- Run 1: 5 minutes on 1 x cpu, commit d, e\n") and "Run 0" not in text


def test_too_few(folders, tmp_path):
    for repeated in (folders[:1], [folders[0], folders[0].parent / folders[0].name, folders[1]]):
        with pytest.raises(ValueError, match="at least two different runs, got"):
            write_seeds(repeated, tmp_path / "out")
    with pytest.raises(ValueError, match="holds no results"):
        write_seeds([folders[0], tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="the baseline 'nope' has no results"):
        write_seeds(folders, tmp_path / "out", baseline="nope")


def test_any_name_is_only_text(tmp_path):
    name = "two\nlines | `$a$` <b> _x_"
    folders = []
    for number in range(2):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        for place, model in enumerate((name, "plain")):
            content = result(model, protocol=name, versions={name: "1"}, commit=name)
            (folders[-1] / f"task--{place}.json").write_text(json.dumps(content))
    table = write_seeds(folders, tmp_path / "out", baseline=name)
    escaped = r"two lines \| \`\$a\$\` \<b> \_x\_"
    assert table.splitlines()[2].startswith(f"| {escaped} |")
    text = (tmp_path / "out" / "seeds.md").read_text()
    assert f"the mean difference to {escaped}, ± its paired" in text and f"- retrieval: {escaped}\n" in text
    assert f"Commit {escaped}, {escaped} 1." in text


def test_an_output_folder_that_cannot_be_made(folders, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as exit:
        main([*map(str, folders), "--output-dir", str(tmp_path / "file")])
    assert exit.value.code.startswith("error: ") and "file" in exit.value.code
