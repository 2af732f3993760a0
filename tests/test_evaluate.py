"""The evaluation command on tiny models, glyphs and datasets given by columns."""

import dataclasses
import io
import json
import shutil
import tarfile
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoProcessor, BertConfig, BertModel, CLIPConfig, CLIPModel

from conversion.presets import PRESETS
from conversion.provenance import model_fingerprint
from conversion.upcycle import upcycle
from data import glyphs
from data.sources import DataArguments
from evaluation import datasets as benchmarks
from evaluation import evaluate, report, seeds
from evaluation.evaluate import Embedder, evaluate_model
from evaluation.report import write_report


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "dense"
    processor = glyphs.build_processor(16, 32)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = processor.tokenizer
    text = {**tower, "vocab_size": len(tokens), "max_position_embeddings": 16}
    text |= {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    vision = {**tower, "image_size": 32, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sparse(dense):
    folder = dense.with_name("sparse")
    preset = dataclasses.replace(PRESETS["clip_up"], num_experts=4)
    upcycle(CLIPModel.from_pretrained(dense), preset).save_pretrained(folder)
    AutoProcessor.from_pretrained(dense).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_benchmarks(monkeypatch):
    """The glyph tasks on a few glyphs."""
    small = {
        name: dataclasses.replace(b, load=cut(b.load), load_train=b.load_train and cut(b.load_train))
        for name, b in benchmarks.BENCHMARKS.items()
    }
    monkeypatch.setattr(evaluate, "BENCHMARKS", small)


def cut(load):
    def first():
        original = glyphs.load, glyphs.load_minimal_pairs
        sizes = {"test": 40, "train": 400}
        glyphs.load = lambda split, style, number, kinds: original[0](split, style, sizes[split], kinds)
        glyphs.load_minimal_pairs = lambda split, number: original[1](split, 12)
        try:
            return load()
        finally:
            glyphs.load, glyphs.load_minimal_pairs = original

    return first


def test_every_glyph_task(sparse, tmp_path):
    results = evaluate_model(sparse, list(benchmarks.BENCHMARKS), tmp_path, name="a model/x")
    for result in results:
        (file,) = tmp_path.glob(f"{result['task']}--a_model_x-*.json")
        stored = json.loads(file.read_text())
        assert stored == result
        assert set(result["primary"]) <= set(result["metrics"])
        assert all(0 <= value <= 1 for value in result["metrics"].values())
        assert result["num_samples"] in (12, 40) and result["num_skipped"] == 0
        assert result["protocol"] and result["versions"]["torch"] == torch.__version__


def test_scores_are_those_of_the_model(dense, tmp_path):
    """Against the obvious way, an image at a time."""
    (result,) = evaluate_model(dense, ["glyphs_zero_shot"], tmp_path, batch_size=7)
    model, processor = AutoModel.from_pretrained(dense).eval(), AutoProcessor.from_pretrained(dense)
    rows = glyphs.load("test", "detailed", 40)
    classes = []
    for kind in glyphs.KINDS:
        prompts = [template.format(kind) for template in glyphs.TEMPLATES]
        embeds = [model.get_text_features(**processor.tokenizer(p, return_tensors="pt")).pooler_output for p in prompts]
        mean = torch.stack([e / e.norm() for e in embeds]).mean(0)
        classes.append(mean / mean.norm())
    right = 0
    for row in rows:
        pixel_values = processor.image_processor(row["image"], return_tensors="pt")["pixel_values"]
        image = model.get_image_features(pixel_values).pooler_output
        similarity = torch.stack([(image * c).sum() for c in classes])
        right += glyphs.KINDS[similarity.argmax()] == row["kind"]
    assert result["metrics"]["accuracy"] == right / 40


def test_results_repeat_and_embeddings_are_kept(dense, sparse, tmp_path, monkeypatch):
    tasks = ["glyphs_retrieval", "glyphs_pairs"]
    first = evaluate_model(dense, tasks, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CLIPModel, "get_image_features", None)  # calling it would fail
        assert evaluate_model(dense, tasks, tmp_path) == first
    other = Embedder(sparse, tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32)
    mine = Embedder(dense, tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32)
    texts = ["a seven", "a red star"]
    assert not np.array_equal(other.texts(texts), mine.texts(texts))  # never another model's


def test_weights_of_the_old_format_are_part_of_the_fingerprint(dense, tmp_path):
    for seed in (1, 2):
        folder = shutil.copytree(dense, tmp_path / str(seed))
        torch.manual_seed(seed)
        weights = CLIPModel(CLIPConfig.from_pretrained(dense)).state_dict()
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    assert model_fingerprint(str(tmp_path / "1")) != model_fingerprint(str(tmp_path / "2"))


def test_how_a_model_runs_is_part_of_the_key(dense, tmp_path, monkeypatch):
    def key(batch_size=8, dtype=torch.float32):
        return Embedder(dense, tmp_path, batch_size, torch.device("cpu"), dtype).key

    keys = [key(), key(batch_size=9), key(dtype=torch.bfloat16)]
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "environment", lambda: {"commit": None, "versions": {"torch": "another"}})
        keys.append(key())
    monkeypatch.setattr(evaluate, "code_hash", lambda: "another")
    assert len({*keys, key()}) == 5


def test_changed_code_has_another_hash_before_it_is_committed(tmp_path, monkeypatch):
    root = Path(evaluate.__file__).parents[1]
    for file in [
        *root.glob("modeling_clip_moe/*.py"),
        root / "training" / "images.py",
        root / "evaluation/evaluate.py",
    ]:
        (tmp_path / file.relative_to(root)).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(root))
    here = evaluate.code_hash()
    monkeypatch.setattr(evaluate, "__file__", str(tmp_path / "evaluation" / "evaluate.py"))
    hashes = {here}
    assert evaluate.code_hash() == here
    for _ in range(2):
        with (tmp_path / "modeling_clip_moe" / "modeling_clip_moe.py").open("a") as code:
            code.write("# changed\n")
        hashes.add(evaluate.code_hash())
    assert len(hashes) == 3


def test_a_damaged_file_of_embeddings_is_named(dense, tmp_path):
    embedder = Embedder(dense, tmp_path, 64, torch.device("cpu"), torch.float32)
    embedder.texts(["a star"])
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=f"{file.name} is damaged; delete it"):
        embedder.texts(["a star"])


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"embeds": np.full((1, 16), np.nan, np.float32)},
        {"embeds": np.zeros((2, 16), np.float32)},
        {"embeds": np.zeros((1, 16), np.int8)},
    ],
    ids=["none", "not finite", "too many", "integers"],
)
def test_kept_embeddings_of_another_kind_are_no_scores(dense, tmp_path, content):
    embedder = Embedder(dense, tmp_path, 64, torch.device("cpu"), torch.float32)
    embedder.texts(["a star"])
    (file,) = tmp_path.glob("*.safetensors")
    save_arrays(content, file)
    with pytest.raises(ValueError, match=f"{file.name} is damaged; delete it"):
        embedder.texts(["a star"])


def test_an_evaluation_that_fails_leaves_no_empty_folder(dense, tmp_path):
    evaluated(dense, tmp_path, tasks="retrieval")
    with pytest.raises(SystemExit, match="error: .* has no column nope"):
        evaluated(dense, tmp_path, "--caption-column", "nope", "--output-dir", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_the_current_folder_has_a_name(dense, tmp_path, monkeypatch):
    monkeypatch.chdir(dense)
    (result,) = evaluate_model(".", ["glyphs_pairs"], tmp_path)
    assert result["model"] == "dense" and (tmp_path / "glyphs_pairs--dense.json").is_file()


def damage(folder, change):
    """Changes the weights in a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


def replace_by_bert(folder):
    BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(folder)


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: damage(folder, lambda w: w.pop("visual_projection.weight")), "missing: visual_projection"),
        (lambda folder: damage(folder, lambda w: w["visual_projection.weight"].fill_(torch.nan)), "not finite"),
        (cut_weights, "cannot load"),
        (remove_tokenizer, "has no tokenizer"),
        (lambda folder: (folder / "processor_config.json").unlink(), "has no image processor"),
        (replace_by_bert, "not 'bert'"),
    ],
    ids=["missing weight", "nan", "truncated", "no tokenizer", "no image processor", "no CLIP"],
)
def test_a_spoilt_model_has_no_score(dense, tmp_path, spoil, message):
    folder = shutil.copytree(dense, tmp_path / "model")
    spoil(folder)
    with pytest.raises(SystemExit) as exit:
        evaluate.main(["--model", str(folder), "--tasks", "glyphs_retrieval", "--output-dir", str(tmp_path / "scores")])
    assert exit.value.code.startswith("error: ") and message in exit.value.code
    assert not list(tmp_path.glob("scores/**/*.json"))


def test_images_below_a_root(dense, tmp_path):
    """Paths that start from --image-root score as the same images inside the dataset do."""
    rows = glyphs.load("test", "web", 20)
    rows.to_parquet(tmp_path / "glyphs.parquet")
    (tmp_path / "images").mkdir()
    entries = []
    for number, row in enumerate(rows):
        row["image"].save(tmp_path / "images" / f"{number}.png")
        answer = {"from": "gpt", "value": row["caption"]}
        entries.append({"image": f"{number}.png", "conversations": [answer]})
    (tmp_path / "glyphs.json").write_text(json.dumps(entries))
    scores = []
    for source, root in (("glyphs.parquet", None), ("glyphs.json", str(tmp_path / "images"))):
        arguments = DataArguments(source=str(tmp_path / source), split="train", image_root=root)
        found = {"retrieval": benchmarks.retrieval_benchmark(arguments)}
        scores += evaluate_model(dense, ["retrieval"], tmp_path / "scores", benchmarks=found)
    assert scores[0]["metrics"] == scores[1]["metrics"]


def labelled(tmp_path, labels, features=None):
    images = [PIL.Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)) for i in range(len(labels))]
    rows = datasets.Dataset.from_dict({"image": images, "label": labels}).cast_column("image", datasets.Image())
    if features is not None:
        rows = rows.cast_column("label", features)
    rows.to_parquet(tmp_path / "labelled.parquet")
    return DataArguments(source=str(tmp_path / "labelled.parquet"), split="test", caption_column="label")


@pytest.mark.parametrize(
    ("labels", "features", "classes"),
    [
        ([0, 1, 1, 0], datasets.ClassLabel(names=["one", "two"]), None),
        ([0, 1, 1, 0], None, ["one", "two"]),
        (["one", "two", "two", "one"], None, None),
    ],
    ids=["class labels", "numbers", "texts"],
)
def test_labels_of_every_sort(tmp_path, labels, features, classes):
    benchmark = benchmarks.zero_shot_benchmark(labelled(tmp_path, labels, features), ["a {}"], classes)
    rows, skipped = benchmark.load()
    assert list(benchmark.classes) == ["one", "two"] and skipped == 0
    assert list(rows["caption"]) == ["one", "two", "two", "one"]


@pytest.mark.parametrize(
    ("labels", "classes", "templates", "message"),
    [
        ([0, 1], None, ["a {}"], "column label holds no names"),
        ([0, 2], ["one", "two"], ["a {}"], "labels go from 0 to 2, but there are 2"),
        (["one", "three"], ["one", "two"], ["a {}"], "no class: three"),
        (["one"], None, ["a photo"], "a photo"),
        (["one"], None, ["{} and {}"], "one {} for the class's name"),
        (["one"], None, ["a {name}"], "one {} for the class's name"),
        (["one"], None, ["a {"], "one {} for the class's name, got .'a {'"),
        (["one"], None, ["a {}}"], "one {} for the class's name"),
        (["one"], None, ["a {:d}"], "one {} for the class's name"),
        (["one"], None, ["a {!r}"], "one {} for the class's name"),
        (["one"], None, ["a {:{}}"], "one {} for the class's name"),
        (["one"], None, ["a {0.x}"], "one {} for the class's name"),
        (["one"], None, [], "got none"),
        (["one", ""], None, ["a {}"], "class 0 has no name"),
        ([0, 1], ["one", " "], ["a {}"], "class 1 has no name"),
        ([0, None], ["one", "two"], ["a {}"], "row 1 of column label has None"),
        (["one", None], None, ["a {}"], "row 1 of column label has None"),
        ([0.0, 1.0], ["one", "two"], ["a {}"], "row 0 of column label has 0.0"),
        ([0, 1], ["crane", "crane"], ["a {}"], "occur twice: crane"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, labels, classes, templates, message):
    with pytest.raises(ValueError, match=message):
        benchmarks.zero_shot_benchmark(labelled(tmp_path, labels), templates, classes)


def class_folders(root, **names):
    """An image folder with two images of each class of each split."""
    for split, classes in names.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(2):
                PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(root / split / name / f"{name}{number}.png")
    return DataArguments(source=str(root), split="test", caption_column="label")


def test_classes_are_those_of_the_column_by_name(tmp_path):
    column = datasets.ClassLabel(names=["cat", "dog", "emu"])
    arguments = labelled(tmp_path, [0, 1, 1, 0], column)
    for classes in (["dog", "cat"], ["ant", "cat", "dog"]):
        rows, _ = benchmarks.zero_shot_benchmark(arguments, ["{}"], classes).load()
        assert list(rows["caption"]) == ["cat", "dog", "dog", "cat"]
    with pytest.raises(ValueError, match="no class: dog; the classes need the column's own names, and are cat, emu"):
        benchmarks.zero_shot_benchmark(arguments, ["{}"], ["cat", "emu"])


@pytest.mark.parametrize("classes", [None, ["a", "b", "c", "d"]])
def test_a_probe_knows_the_classes_of_both_splits_by_name(tmp_path, classes):
    arguments = class_folders(tmp_path / "folders", train="acd", test="bcd")
    benchmark = benchmarks.linear_probe_benchmark(arguments, "train", classes)
    assert sorted(benchmark.classes) == ["a", "b", "c", "d"]
    for load, expected in ((benchmark.load, "bbccdd"), (benchmark.load_train, "aaccdd")):
        assert "".join(load()[0]["caption"]) == expected


def test_command_on_columns(dense, tmp_path, capsys):
    rows = glyphs.load("test", "web", 20, captions_per_image=2).rename_columns({"image": "jpg", "caption": "texts"})
    rows.to_parquet(tmp_path / "glyphs.parquet")
    command = ["--model", str(dense), "--dataset", str(tmp_path / "glyphs.parquet"), "--image-column", "jpg"]
    command += ["--caption-column", "texts", "--label-column", "kind", "--tasks", "retrieval,zero_shot"]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    out = capsys.readouterr().out
    assert out.count("(20 samples, 0 skipped)") == 2 and "retrieval-glyphs.parquet-test-texts-" in out
    (file,) = (tmp_path / "scores").glob("zero_shot-glyphs.parquet-test-kind-*--dense.json")
    assert json.loads(file.read_text())["protocol"] == (
        f"all rows of {tmp_path / 'glyphs.parquet'}, split test, columns jpg and kind; {len(set(rows['kind']))} "
        "classes, 1 templates: 'a photo of a {}.'"
    )
    (file,) = (tmp_path / "scores").glob("retrieval-*.json")
    result = json.loads(file.read_text())
    assert result["protocol"] == f"all rows of {tmp_path / 'glyphs.parquet'}, split test, columns jpg and texts"
    assert result["num_captions"] == 40


def test_skipped_images_are_in_the_result(dense, tmp_path):
    rows = glyphs.load("test", "web", 20).cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3]["image"]["bytes"] = rows[3]["image"]["bytes"][:40]
    features = datasets.Features({name: datasets.Value("string") for name in rows[0]} | {"image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "damaged.parquet")
    arguments = DataArguments(source=str(tmp_path / "damaged.parquet"), split="test", max_unreadable=0.1)
    found = {"retrieval": benchmarks.retrieval_benchmark(arguments)}
    (result,) = evaluate_model(dense, ["retrieval"], tmp_path, benchmarks=found)
    assert (result["num_samples"], result["num_skipped"]) == (19, 1)


def evaluated(model, tmp_path, *arguments, tasks="retrieval"):
    """The command on two folders of the same glyphs; what it wrote."""
    for source in ("one", "two"):
        (tmp_path / source).mkdir(exist_ok=True)
        for split in ("train", "test"):
            rows = glyphs.load(split, "web", 12).add_column("number", [0, 1] * 6)
            rows = rows.rename_column("color", "other caption")
            photos = rows.select_columns("image").rename_column("image", "photo")
            rows = datasets.concatenate_datasets([rows, photos], axis=1)
            rows.to_parquet(tmp_path / source / f"{split}.parquet")
    before = set((tmp_path / "scores").glob("*.json"))
    command = ["--model", str(model), "--dataset", str(tmp_path / "one"), "--tasks", tasks]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores"), *arguments])
    return sorted(set((tmp_path / "scores").glob("*.json")) - before)


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("retrieval", ["--dataset", "two"]),
        ("retrieval", ["--split", "train"]),
        ("retrieval", ["--num-samples", "11"]),
        ("retrieval", ["--image-column", "photo"]),
        ("retrieval", ["--caption-column", "other caption"]),
        ("zero_shot", ["--label-column", "other caption"]),
        ("zero_shot", ["--templates", "a photo of a {}.", "a {}"]),
        ("zero_shot", ["--label-column", "number", "--classes", "classes.txt"]),
        ("zero_shot", ["--label-column", "number", "--classes", "others.txt"]),
        ("linear_probe", ["--train-split", "test"]),
    ],
)
def test_results_of_other_data_are_kept_apart(dense, tmp_path, monkeypatch, task, change):
    monkeypatch.chdir(tmp_path)
    Path("classes.txt").write_text("one\ntwo\n")
    Path("others.txt").write_text("two\none\n")
    plain = ["--label-column", "texture"]
    if "--classes" in change:
        plain = ["--label-column", "number", "--classes", "third.txt"]
        Path("third.txt").write_text("three\nfour\n")
    (first,) = evaluated(dense, tmp_path, *plain, tasks=task)
    (second,) = evaluated(dense, tmp_path, *plain, *change, tasks=task)
    assert evaluated(dense, tmp_path, *plain, tasks=task) == []  # the same once more is the same file
    results = [json.loads(file.read_text()) for file in (first, second)]
    assert results[0]["task"] != results[1]["task"] and results[0]["data"] != results[1]["data"]
    assert results[0]["protocol"] != results[1]["protocol"] or "--classes" in change
    header = write_report(results, tmp_path / "report").splitlines()[0]
    assert len(set(header.strip("|").split("|"))) == 1 + 2 * len(results[0]["primary"])
    results[1]["task"] = results[0]["task"]
    for model in ("dense", "another"):
        with pytest.raises(ValueError, match="two results of|cannot be compared|need the same metrics"):
            write_report([results[0], results[1] | {"model": model}], tmp_path / "report")


def test_names_that_look_alike_have_files_of_their_own(dense, tmp_path):
    names = ["a b", "a_b", "a/b", "ä", "ö", "x" * 300, "x" * 301, "dense"]
    for name in names:
        evaluate_model(dense, ["glyphs_pairs"], tmp_path, name=name)
    files = [json.loads(file.read_text())["model"] for file in tmp_path.glob("glyphs_pairs--*.json")]
    assert sorted(files) == sorted(names)
    assert (tmp_path / "glyphs_pairs--a_b.json").is_file() and (tmp_path / "glyphs_pairs--dense.json").is_file()
    with pytest.raises(ValueError, match="a model needs a name, not ' '"):
        evaluate_model(dense, ["glyphs_pairs"], tmp_path, name=" ")


def test_scores_of_another_measurement_are_not_overwritten(dense, tmp_path, monkeypatch):
    evaluate_model(dense, ["glyphs_pairs"], tmp_path)
    path = tmp_path / "glyphs_pairs--dense.json"
    before = path.read_bytes()
    command = ["--model", str(dense), "--tasks", "glyphs_pairs", "--output-dir", str(tmp_path)]
    other = {"glyphs_pairs": dataclasses.replace(evaluate.BENCHMARKS["glyphs_pairs"], protocol="half of them")}
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "measure", None)  # calling it would fail
        with pytest.raises(SystemExit) as exit:
            evaluate.main([*command, "--dtype", "bfloat16"])
        assert f"{path} holds a result of 'dense' with another dtype, 'float32' and not 'bfloat16': " in exit.value.code
        assert "--name" in exit.value.code
        with pytest.raises(ValueError, match="with another protocol, .* and not 'half of them'"):
            evaluate_model(dense, ["glyphs_pairs"], tmp_path, benchmarks=other)
    assert path.read_bytes() == before
    evaluate_model(dense, ["glyphs_pairs"], tmp_path, batch_size=7)  # changes no numbers
    assert json.loads(path.read_text())["batch_size"] == 7


@pytest.mark.parametrize("old", [False, True], ids=["", "of an earlier version"])
def test_scores_of_other_weights_are_not_overwritten(dense, tmp_path, monkeypatch, old):
    other = shutil.copytree(dense, tmp_path / "other" / "dense")
    damage(other, lambda weights: weights["visual_projection.weight"].mul_(2))
    evaluate_model(dense, ["glyphs_pairs"], tmp_path)
    path = tmp_path / "glyphs_pairs--dense.json"
    before = json.loads(path.read_text())
    if old:
        del before["weights"]
        path.write_text(json.dumps(before))
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "measure", None)  # calling it would fail
        command = ["--model", str(other), "--tasks", "glyphs_retrieval,glyphs_pairs", "--output-dir", str(tmp_path)]
        with pytest.raises(SystemExit) as exit:
            evaluate.main(command)
    assert f"{path} holds the result of another model, 'dense' from {dense}: " in exit.value.code
    assert "--name" in exit.value.code
    assert json.loads(path.read_text()) == before
    evaluate_model(dense, ["glyphs_pairs"], tmp_path)  # the same weights
    evaluate_model(other, ["glyphs_pairs"], tmp_path, name="other")
    path.write_text(json.dumps({**before, "model": "Dense"}))  # another name where files ignore case
    with pytest.raises(ValueError, match="holds the result of another model, 'Dense'"):
        evaluate_model(dense, ["glyphs_pairs"], tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=f"{path.name} is no JSON"):
        evaluate_model(dense, ["glyphs_pairs"], tmp_path)


def test_an_output_folder_is_made_before_the_work(dense, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(evaluate, "measure", None)  # calling it would fail
    for output in ("file", "file/below"):
        with pytest.raises(SystemExit) as exit:
            evaluate.main(["--model", str(dense), "--tasks", "glyphs_pairs", "--output-dir", str(tmp_path / output)])
        assert exit.value.code.startswith("error: ") and "file" in exit.value.code


def test_tasks_with_blanks_between(dense, tmp_path, capsys):
    command = ["--model", str(dense), "--tasks", " glyphs_pairs, glyphs_retrieval ", "--output-dir", str(tmp_path)]
    evaluate.main(command)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["glyphs_pairs", "glyphs_retrieval"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\n\ntwo\n", "classes.txt has no class in line 2"),
        (b"one\n  \t\ntwo", "classes.txt has no class in line 2"),
        (b"\none\ntwo", "classes.txt has no class in line 1"),
        (b"one\ntwo\n\n", "classes.txt has no class in line 3"),
        (b"", "classes.txt has no class in line 1"),
        (b"one\ntwo \xff", "classes.txt is no text in UTF-8"),
        (b"one\none", "occur twice: one"),
        (None, "classes.txt"),
    ],
)
def test_lists_of_classes(dense, tmp_path, content, message):
    if content is None:
        (tmp_path / "classes.txt").mkdir()
    else:
        (tmp_path / "classes.txt").write_bytes(content)
    arguments = ["--label-column", "number", "--classes", str(tmp_path / "classes.txt")]
    with pytest.raises(SystemExit) as exit:
        evaluated(dense, tmp_path, *arguments, tasks="zero_shot")
    assert exit.value.code.startswith("error: ") and message in exit.value.code


def test_a_list_of_classes_as_other_programs_write_it(dense, tmp_path):
    r"""With a byte order mark, \r\n and a line separator within a name, which `str.splitlines` takes for a new line."""
    (tmp_path / "classes.txt").write_bytes("\ufeffone\u2028half \r\ntwo\r\n".encode())
    assert benchmarks.read_classes(tmp_path / "classes.txt") == ["one\u2028half", "two"]


@pytest.mark.parametrize("device", ["meta", "nonsense", "", "cuda:99", "hpu", "vulkan", "privateuseone"])
def test_devices_that_cannot_compute(device):
    with pytest.raises(ValueError, match=f"cannot compute on the device {device}"):
        evaluate.usable_device(device)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nope"], "unknown task nope; there are glyphs_zero_shot"),
        (["--tasks", "retrieval"], "the task retrieval needs --dataset"),
        (["--tasks", "retrieval", "--dataset", ""], "the task retrieval needs --dataset"),
        (["--tasks", "glyphs_pairs,glyphs_retrieval, glyphs_pairs"], "these tasks occur twice: glyphs_pairs"),
        (["--tasks", "glyphs_pairs,"], "unknown task ''; there are"),
        (["--tasks", ""], "unknown task ''; there are"),
        (["--tasks", "retrieval", "--dataset", "nowhere.parquet"], "nowhere.parquet"),
        (["--tasks", "glyphs_pairs", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--tasks", "glyphs_pairs", "--device", "nonsense"], "cannot compute on the device nonsense"),
        (["--tasks", "glyphs_pairs", "--device", "meta"], "cannot compute on the device meta"),
        (["--tasks", "glyphs_pairs", "--name", ""], "a model needs a name, not ''"),
    ],
)
def test_mistakes_end_in_one_line(dense, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as exit:
        evaluate.main(["--model", str(dense), "--output-dir", str(tmp_path / "new"), *arguments])
    assert exit.value.code.startswith("error: ") and message in exit.value.code
    assert not list((tmp_path / "new").glob("*"))


@pytest.mark.parametrize("command", [evaluate.main, report.main, seeds.main])
def test_an_output_folder_without_a_name(dense, tmp_path, monkeypatch, capsys, command):
    """It would be the current folder."""
    monkeypatch.chdir(tmp_path)
    inputs = ["--model", str(dense), "--tasks", "glyphs_pairs"] if command is evaluate.main else ["x"]
    with pytest.raises(SystemExit) as exit:
        command([*inputs, "--output-dir", ""])
    assert exit.value.code == 2 and capsys.readouterr().err.endswith("argument --output-dir: a folder needs a name\n")


@pytest.mark.parametrize("task", ["retrieval", "zero_shot", "linear_probe"])
def test_one_column_is_not_two(dense, tmp_path, task):
    column = "--caption-column" if task == "retrieval" else "--label-column"
    with pytest.raises(SystemExit) as exit:
        evaluated(dense, tmp_path, column, "image", tasks=task)
    assert "the column image cannot hold both the images and" in exit.value.code


def shard(folder, number=8, turned=False):
    """A webdataset shard as CLIP_benchmark has them: two captions of each image, a line each."""
    folder.mkdir()
    texts = []
    with tarfile.open(folder / "0.tar", "w") as tar:
        for index, row in enumerate(glyphs.load("test", "web", number, captions_per_image=2)):
            image, file, exif = row["image"], io.BytesIO(), PIL.Image.Exif()
            if turned:  # a viewer shows the same
                image, exif[0x0112] = image.transpose(PIL.Image.Transpose.ROTATE_90), 6
            image.save(file, "png", exif=exif)
            texts += row["caption"]
            for suffix, content in (("png", file.getvalue()), ("txt", "\n".join([*row["caption"], ""]).encode())):
                member = tarfile.TarInfo(f"{index}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return texts


def measured_texts(monkeypatch):
    """Filled with the texts that are embedded."""
    original, measured = Embedder.texts, []
    monkeypatch.setattr(Embedder, "texts", lambda self, texts: measured.extend(texts) or original(self, texts))
    return measured


def test_retrieval_of_captions_one_a_line(dense, tmp_path, monkeypatch):
    texts, measured = shard(tmp_path / "x"), measured_texts(monkeypatch)
    options = ["--split", "train", "--image-column", "png", "--caption-column", "txt", "--captions-per-line"]
    command = ["--model", str(dense), "--tasks", "retrieval", "--dataset", str(tmp_path / "x"), *options]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    assert measured == texts


def test_captions_that_are_missing_are_no_queries(dense, tmp_path, monkeypatch):
    rows = glyphs.load("test", "web", 4, captions_per_image=2)
    captions = [["a", None], ["b", " "], ["", "c"], ["d", "e"]]
    rows.remove_columns("caption").add_column("caption", captions).to_parquet(tmp_path / "x.parquet")
    measured = measured_texts(monkeypatch)
    found = {"retrieval": benchmarks.retrieval_benchmark(DataArguments(source=str(tmp_path / "x.parquet")))}
    evaluate_model(dense, ["retrieval"], tmp_path, benchmarks=found)
    assert measured == ["a", "b", "c", "d", "e"]


def test_turned_images_score_as_what_a_viewer_shows(dense, tmp_path):
    shard(tmp_path / "x"), shard(tmp_path / "turned", turned=True)
    embedder, embeds = Embedder(dense, None, 8, torch.device("cpu")), []
    for name in ("x", "turned"):
        columns = {"image_column": "png", "caption_column": "txt"}
        rows, _ = benchmarks.retrieval_benchmark(DataArguments(source=str(tmp_path / name), **columns)).load()
        embeds.append(embedder.images(rows))
    assert np.array_equal(*embeds)


def test_a_split_that_is_not_there_ends_in_one_line(dense, tmp_path):
    shard(tmp_path / "x")
    command = ["--model", str(dense), "--tasks", "retrieval", "--dataset", str(tmp_path / "x")]
    with pytest.raises(SystemExit) as exit:
        evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    assert exit.value.code == f"error: {tmp_path / 'x'} has no split 'test', only train: set split (--split)"
