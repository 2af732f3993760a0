"""Publishing: nothing of a source runs or is passed on but what this package wrote."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from documents import BASE, ROOT
from tiny_clip import change_json
from transformers import AutoProcessor, BertConfig, BertModel, CLIPModel

from clip_moe.conversion.commands import publish
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.publishing import bundle
from clip_moe.conversion.publishing.trusted_code import cleaned, require_trusted_code
from clip_moe.conversion.upcycle import upcycle
from clip_moe.evaluation.sentence_encoders import load_encoder
from modeling_clip_moe import CLIPMoDEModel


@pytest.fixture
def ran(tmp_path, monkeypatch) -> Path:
    """A file that is there once planted code has run; the code lies in a folder that `elsewhere--evil` names."""
    monkeypatch.chdir(tmp_path)
    plant_module(tmp_path / "elsewhere", tmp_path / "ran")
    return tmp_path / "ran"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "model"
    upcycle(CLIPModel.from_pretrained(BASE), PRESETS["clip_moe"], seed=0).save_pretrained(folder)
    return folder


def plant_module(folder, ran):
    folder.mkdir(exist_ok=True)
    classes = "CLIPConfig as Config, CLIPModel as Model, CLIPProcessor as Processor, CLIPTokenizer as Tokenizer"
    run = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
    (folder / "evil.py").write_text(f"{run}from transformers import {classes}\n")
    (folder / "payload.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def files(folder):
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def assert_clean(folder):
    """No file of planted code, nor one that names it."""
    for name, path in files(folder).items():
        assert "evil" not in name and path.suffix not in (".pkl", ".bin")
        assert path.suffix not in (".json", ".py") or "evil" not in path.read_text(), name
        if path.suffix == ".py":
            assert path.read_bytes() == (ROOT / "modeling_clip_moe" / path.name).read_bytes(), name


@pytest.mark.slow
def test_planted_code_neither_runs_nor_is_published(ran, tmp_path, capsys):
    """Of a mixture: in its own folder, in those of a dense and of a sparse expert, and in its encoder of metadata."""
    source, out, dense = tmp_path / "source", tmp_path / "out", CLIPModel.from_pretrained(BASE)
    CLIPMoDEModel.from_experts([dense, upcycle(dense, PRESETS["clip_moe"], seed=0)]).save_pretrained(source)
    AutoProcessor.from_pretrained(BASE).save_pretrained(source)
    encoder = source / "metadata_encoder"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=1313, **sizes)).save_pretrained(encoder / "model")
    AutoProcessor.from_pretrained(BASE).tokenizer.save_pretrained(encoder / "model")
    change_json(encoder / "model/tokenizer_config.json", processor_class=None)  # which would need an image processor
    change_json(encoder / "encoder.json", kind="text", name="bert", source="runs/bert", pooling="mean")
    for folder in (source, source / "expert_0", source / "expert_1", encoder, encoder / "model"):
        plant_module(folder, ran)
    for name in ("config.json", "expert_0/config.json", "expert_1/config.json", "metadata_encoder/model/config.json"):
        auto_map = {"AutoModelForZeroShotImageClassification": "elsewhere--evil.Model"}
        change_json(source / name, auto_map=auto_map)
    change_json(
        source / "expert_0/config.json",
        custom_pipelines={"classify": {"impl": "evil.Pipeline", "pt": ["CLIPModel"]}},
        text_config={"auto_map": {"AutoModel": "evil.Model"}},
    )
    change_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})
    images = {"auto_map": {"AutoImageProcessor": "elsewhere--evil.Model"}}
    change_json(source / "processor_config.json", auto_map={"AutoProcessor": "evil.Processor"}, image_processor=images)
    images = json.loads((source / "processor_config.json").read_text())["image_processor"]
    change_json(source / "preprocessor_config.json", **images)
    (source / "modeling_clip_moe.py").write_text("import evil\n")
    assert load_encoder(encoder).encode(["a star"]).shape == (1, 8)
    publish.main([str(source), "user/mixture", "--dry_run", str(out)])
    assert not ran.exists()
    assert_clean(out)
    warnings = capsys.readouterr().err
    for entry in (
        "expert_0/config.json: custom_pipelines {'classify': {'impl': 'evil.Pipeline', 'pt': ['CLIPModel']}}",
        "expert_0/config.json: text_config.auto_map.AutoModel 'evil.Model'",
        "expert_1/config.json: auto_map.AutoModelForZeroShotImageClassification 'elsewhere--evil.Model'",
        "tokenizer_config.json: auto_map.AutoTokenizer [None, 'evil.Tokenizer']",
        "processor_config.json: image_processor.auto_map.AutoImageProcessor 'elsewhere--evil.Model'",
        "preprocessor_config.json: auto_map.AutoImageProcessor 'elsewhere--evil.Model'",
    ):
        assert f"warning: {entry} is left out" in warnings
    for name, own in ((".", "modeling_clip_mode.CLIPMoDEModel"), ("expert_1", "modeling_clip_moe.CLIPMoEModel")):
        config = json.loads((out / name / "config.json").read_text())
        assert config["auto_map"]["AutoModelForZeroShotImageClassification"] == own
    assert load_encoder(out / "metadata_encoder").encode(["a star"]).shape == (1, 8)
    assert {"expert_0/model.safetensors", "expert_1/config.json", "modeling_clip_mode.py"} <= files(out).keys()
    assert "A mixture of 2 models (CLIP)" in (out / "README.md").read_text()


@pytest.mark.slow
def test_the_bundled_model_is_published_with_this_code(capsys):
    """In a process without the package, it passes its self-test there."""
    folder, package = ROOT / "training" / "name_clip_moe", ROOT / "modeling_clip_moe"
    assert all(path.resolve() == package / path.name for path in folder.glob("*.py"))
    bundle.verify(folder)
    assert "computes the same without this package: largest relative difference " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"auto_map": {"AutoModel": "elsewhere--evil.Model"}}, "config.json names code .*elsewhere--"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, "names code .*evil.Token"),
        ("expert_0/config.json", {"custom_pipelines": {"x": {"impl": "evil.P"}}}, "names code .*custom_pipelines"),
        ("modeling_clip_moe.py", "import evil\n", "modeling_clip_moe.py is not this package's"),
        ("modeling_clip_moe.py", None, "config.json names code .*modeling_clip_moe.py.* not there"),
    ],
)
def test_the_check_trusts_nothing_else(sparse, tmp_path, ran, file, changes, message):
    folder = shutil.copytree(sparse, tmp_path / "folder")
    require_trusted_code(folder)
    if changes is None:
        (folder / file).unlink()
    elif isinstance(changes, dict):
        change_json(folder / file, **changes)
    else:
        (folder / file).write_text(changes)
    with pytest.raises(ValueError, match=message):
        bundle.verify(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metadata_encoder/modules.json", '[{"path": "", "type": "evil.Module"}]'),
        ("metadata_encoder/1_Dense/config.json", '{"activation_function": "evil.abort"}'),
    ],
)
def test_what_cannot_be_left_out_is_refused(file, content):
    with pytest.raises(ValueError, match=f"{file}: .*evil"):
        cleaned(json.loads(content), Path(file))


@pytest.mark.parametrize("auto_map", ["evil.Model", 3, {"AutoModel": {"pil": "evil.Model"}}], ids=str)
def test_an_auto_map_of_any_shape_is_left_out(auto_map):
    assert cleaned({"model_type": "clip", "auto_map": auto_map}, Path("config.json")) == {"model_type": "clip"}


def test_an_encoder_that_is_ours_gets_our_code(tmp_path, sparse):
    encoder, out = tmp_path / "encoder", tmp_path / "out"
    shutil.copytree(sparse, encoder / "model")
    (encoder / "model" / "modeling_clip_moe.py").write_text("import evil\n")
    change_json(encoder / "encoder.json", kind="transformers", name="ours", source="/home/me/ours")
    bundle.write_encoder(encoder, out)
    bundle.clean_settings(out)
    require_trusted_code(out)
    assert {"model/modeling_clip_moe.py", "model/configuration_clip_moe.py"} <= files(out).keys()
    assert_clean(out)
    assert json.loads((out / "encoder.json").read_text())["source"] == "ours"


def test_private_parts_of_transformers_and_torch_stand_in_one_file_each():
    modules = "integrations|core_model_loading|conversion_mapping|dynamic_module_utils|utils.(generic|output_capturing)"
    modules = re.compile(rf"\.({modules})\b")
    for path in (ROOT / "modeling_clip_moe").glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        parts = [f"{node.module}.{name.name}" for node in imports if not node.level for name in node.names]
        private = [part for part in parts if re.match(r"transformers\b.*\._[a-z]", part) or modules.search(part)]
        assert bool(private) == (path.name == "transformers_internals.py"), (path.name, private)
        private = re.findall(r"\btorch(?:\.\w+)*\._[a-zC]\w*", path.read_text())
        assert bool(private) == (path.name == "torch_internals.py"), (path.name, private)
