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
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoProcessor, BertConfig, BertModel, CLIPConfig, CLIPModel

from conversion.provenance import fingerprint
from conversion.upcycle import PRESETS, upcycle
from evaluation import datasets as benchmarks
from evaluation import evaluate
from evaluation.evaluate import Embedder, evaluate_model
from training import glyphs
from training.data import DataArguments


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
    small = {name: dataclasses.replace(b, load=cut(b.load)) for name, b in benchmarks.BENCHMARKS.items()}
    monkeypatch.setattr(evaluate, "BENCHMARKS", small)


def cut(load):
    def first():
        original = glyphs.load, glyphs.load_pairs
        glyphs.load = lambda split, style, number, kinds: original[0](split, style, 40, kinds)
        glyphs.load_pairs = lambda split, number: original[1](split, 12)
        try:
            return load()
        finally:
            glyphs.load, glyphs.load_pairs = original

    return first


def test_every_glyph_task(sparse, tmp_path):
    results = evaluate_model(sparse, list(benchmarks.BENCHMARKS), tmp_path, name="a model/x")
    for result in results:
        stored = json.loads((tmp_path / f"{result['task']}--a_model_x.json").read_text())
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
    assert fingerprint(str(tmp_path / "1")) != fingerprint(str(tmp_path / "2"))


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
    for file in [*root.glob("modeling_clip_moe/*.py"), root / "training" / "data.py", root / "evaluation/evaluate.py"]:
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
        ([0, None], ["one", "two"], ["a {}"], "row 1 of column label has None"),
        (["one", None], None, ["a {}"], "row 1 of column label has None"),
        ([0.0, 1.0], ["one", "two"], ["a {}"], "row 0 of column label has 0.0"),
        ([0, 1], ["crane", "crane"], ["a {}"], "occur twice: crane"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, labels, classes, templates, message):
    with pytest.raises(ValueError, match=message):
        benchmarks.zero_shot_benchmark(labelled(tmp_path, labels), templates, classes)


def test_command_on_columns(dense, tmp_path, capsys):
    rows = glyphs.load("test", "web", 20, captions_per_image=2).rename_columns({"image": "jpg", "caption": "texts"})
    rows.to_parquet(tmp_path / "glyphs.parquet")
    command = ["--model", str(dense), "--dataset", str(tmp_path / "glyphs.parquet"), "--image-column", "jpg"]
    command += ["--caption-column", "texts", "--label-column", "kind", "--tasks", "retrieval,zero_shot"]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    assert "retrieval (20 samples, 0 skipped)" in capsys.readouterr().out
    result = json.loads((tmp_path / "scores" / "zero_shot--dense.json").read_text())
    assert "all rows of" in result["protocol"] and "1 templates" in result["protocol"]


def test_skipped_images_are_in_the_result(dense, tmp_path):
    rows = glyphs.load("test", "web", 20).cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3]["image"]["bytes"] = rows[3]["image"]["bytes"][:40]
    features = datasets.Features({name: datasets.Value("string") for name in rows[0]} | {"image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "damaged.parquet")
    arguments = DataArguments(source=str(tmp_path / "damaged.parquet"), split="test", max_unreadable=0.1)
    found = {"retrieval": benchmarks.retrieval_benchmark(arguments)}
    (result,) = evaluate_model(dense, ["retrieval"], tmp_path, benchmarks=found)
    assert (result["num_samples"], result["num_skipped"]) == (19, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nope"], "unknown task nope; there are glyphs_zero_shot"),
        (["--tasks", "retrieval"], "the task retrieval needs --dataset"),
        (["--tasks", "retrieval", "--dataset", "nowhere.parquet"], "nowhere.parquet"),
        (["--tasks", "glyphs_pairs", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--tasks", "glyphs_pairs", "--device", "nonsense"], "cannot compute on the device nonsense"),
    ],
)
def test_mistakes_end_in_one_line(dense, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as exit:
        evaluate.main(["--model", str(dense), "--output-dir", str(tmp_path), *arguments])
    assert exit.value.code.startswith("error: ") and message in exit.value.code


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
