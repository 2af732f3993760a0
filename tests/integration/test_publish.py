"""Publishing: what is in the folder, that it loads without the package, and what the Hub sees."""

import json
import re
import shutil

import pytest
import torch
import transformers
import yaml
from documents import ROOT
from huggingface_hub import ModelCard
from programs import WITHOUT_PACKAGE, run_program
from safetensors.torch import save_file
from tiny_clip import change_json, error_of
from tiny_runs import run_stages, weights
from transformers import AutoModel, AutoProcessor, CLIPModel

from clip_moe.conversion.commands import publish
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.publishing import bundle
from clip_moe.conversion.publishing.lineage import Lineage
from clip_moe.conversion.upcycle import sparse_blocks, upcycle
from modeling_clip_moe import CLIPMoDEModel
from modeling_clip_moe.self_test import SUM_TOLERANCE, TOLERANCE, every_expert, weight_sums

BASE = "training/symbol_clip"
STAGES = """
- {name: upcycled, stage: upcycle, model: training/symbol_clip, preset: clip_up, changes: {num_experts: 4}}
- name: clip_up
  stage: train
  model: upcycled
  data: {source: symbols, captions: detailed, num_samples: 64}
  global_batch_size: 32
  max_steps: 2
  learning_rate: 1.0e-3
- name: evaluation
  stage: evaluate
  models: {dense: training/symbol_clip, CLIP-UP: clip_up}
  tasks: [symbols_pairs]
  max_rows: 96
"""


SELF_TEST = f"""{WITHOUT_PACKAGE}
from transformers import AutoModel
name, revision = sys.argv[1:]
model = AutoModel.from_pretrained(name, trust_remote_code=True, dtype="float32", revision=revision)
print(model.logit_scale.item(), model.self_test(revision=revision))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: an upcycled symbol CLIP, trained for two steps and measured."""
    folder = tmp_path_factory.mktemp("publish")
    return run_stages(folder, yaml.safe_load(STAGES))


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("published") / "model"
    arguments = [str(run / "clip_up"), "user/clip-moe-symbols", "--dry_run", str(output), "--license", "apache-2.0"]
    publish.main([*arguments, "--base_model", "user/symbol-clip"])
    return output


def test_the_folder_has_all_that_others_look_for(run, published):
    names = {path.relative_to(published).as_posix() for path in published.rglob("*") if path.is_file()}
    assert {"preprocessor_config.json", "vocab.json", "merges.txt"} <= names
    assert {"config.json", "model.safetensors", "modeling_clip_moe.py", "configuration_clip_moe.py"} <= names
    assert {"README.md", "LICENSE-CODE", "recipe.yaml", "report.svg", "selftest.safetensors", "self_test.py"} <= names
    assert (published / "selftest.safetensors").stat().st_size < 100_000
    assert "results/symbols_pairs--CLIP-UP.json" in names and "results/symbols_pairs--dense.json" not in names
    assert not {"manifest.json", "log.jsonl"} & names
    assert not [name for name in names if name.startswith(".eval_results")]  # its tasks are no benchmark of the Hub
    assert "is_local" not in (published / "tokenizer_config.json").read_text()
    expected, found = weights(run / "clip_up"), weights(published)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_card_tells_what_is_so(run, published):
    card = ModelCard.load(published / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["base_model"]) == ("apache-2.0", "user/symbol-clip")
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "zero-shot-image-classification")
    result = json.loads((run / "evaluation" / "symbols_pairs--CLIP-UP.json").read_text())
    (score,) = card.data.eval_results
    assert score.metric_value == round(100 * result["metrics"]["group"], 2) and score.dataset_type == "symbols_pairs"
    assert f"| {100 * result['metrics']['group']:.1f} |" in card.text and result["protocol"] in card.text
    assert result["commit"] in card.text
    assert "Data: 64 pairs of symbols (detailed captions)." in card.text and '"a picture of a snowman"' in card.text
    assert "It inherits the limits of user/symbol-clip. Since then it has been trained on 64 pairs" in card.text
    assert "# clip-moe-symbols" in card.text and "| clip_up | train |" in card.text
    assert 'from_pretrained("user/clip-moe-symbols", trust_remote_code=True, revision="main")' in card.text
    assert "The weights: apache-2.0; they come from user/symbol-clip" in card.text
    assert "wang2025clipup" in card.text and "zhang2025clipmoe" not in card.text
    assert "](report.svg)" in card.text
    assert "None" not in card.text and "{{ " not in card.text and "{%" not in card.text

    lineage = Lineage.of(run / "clip_up")
    assert list(lineage.stages) == ["upcycled", "clip_up"] and lineage.unknown == ["symbol_clip"]
    assert re.search(r"\nOn 1 x .*, \d+\.\d\d hours in all\. Commit ", card.text)


def test_the_hub_gets_one_commit(run, hub, login, unverified, capsys):
    publish.main([str(run / "clip_up"), "user/symbols", "--private"])
    repository = hub.repositories["models", "user/symbols"]
    commit = repository.refs["main"]
    assert capsys.readouterr().out.endswith(f"/user/symbols/commit/{commit}\n")
    assert repository.private and len(repository.commits) == 2  # the empty one of a new repository
    files = hub.files("user/symbols")
    assert {"preprocessor_config.json", "vocab.json", "merges.txt"} < set(files)
    assert files["model.safetensors"] == (run / "clip_up" / "model.safetensors").read_bytes()


def test_a_recipe_publishes_at_its_end(hub, login, unverified, tmp_path):
    """Of a model on the Hub, which the card names."""
    hub.put("user/base", ROOT / BASE)
    stages = [{"name": "sparse", "stage": "upcycle", "model": "user/base", "preset": "clip_moe"}]
    run_stages(tmp_path, stages, push_to_hub={"sparse": "user/from-a-recipe"})
    card = hub.files("user/from-a-recipe")["README.md"]
    assert b"| sparse | upcycle |" in card and b"base_model: user/base" in card


@pytest.mark.parametrize(
    ("token", "name", "license", "message"),
    [
        (None, "user/x", [], "^error: Token is required .*`hf auth login`"),
        ("hf_other", "user/x", [], "^error: .*Invalid credentials"),
        ("hf_owner", "other/x", [], "^error: .*the rights to create a model under this namespace"),
        ("hf_owner", "user/x", ["--license", "MIT"], '^error: Invalid metadata in README.md.*"license" must be one of'),
    ],
)
def test_what_the_hub_refuses_is_one_line(token, name, license, message, run, hub, unverified, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN", raising=False)
    assert re.search(message, error_of(publish.main, run / "clip_up", name, *license))
    # An upload that is refused leaves its repository empty
    assert not hub.files(name) if license else not hub.repositories


def test_a_published_model_loads_at_a_revision(published, hub, login, tmp_path):
    """In a process without this package, online and then offline; the newest commit has other weights."""
    bundle.upload(published, "user/symbols")
    first, state = hub.repositories["models", "user/symbols"].refs["main"], weights(published)
    save_file({key: 2 * tensor for key, tensor in state.items()}, tmp_path / "other.safetensors", {"format": "pt"})
    other = {"model.safetensors": (tmp_path / "other.safetensors").read_bytes()}
    hub.put("user/symbols", hub.files("user/symbols") | other)
    for offline in "01":
        printed = run_program(tmp_path, "-c", SELF_TEST, "user/symbols", first, HF_HUB_OFFLINE=offline)
        assert f"{state['logit_scale'].item()} {{'text features': 0.0" in printed  # behind what libraries print
        assert "[y/N]" not in printed


def test_an_upload_that_is_cut_off_ends_in_one_line(published, hub, login):
    """Nothing of it is visible; the next one is whole."""
    hub.cuts = 1
    with pytest.raises(ConnectionError, match="the upload to user/symbols was cut off, nothing of it is visible: "):
        bundle.upload(published, "user/symbols")
    assert not hub.files("user/symbols")
    bundle.upload(published, "user/symbols")
    assert "model.safetensors" in hub.files("user/symbols")


def test_what_cannot_be_published_is_refused(tmp_path):
    sparse = upcycle(CLIPModel.from_pretrained(BASE), PRESETS["clip_moe"], seed=0)
    sparse.save_pretrained(tmp_path / "bare")
    sparse.vision_model.save_pretrained(tmp_path / "tower")
    for source, name, message in (
        (BASE, "no name", ".*Repo id"),
        ("runs/nothing", "user/x", ".*No such file or directory: 'runs/nothing'"),
        (tmp_path / "tower", "user/x", ".* expected a model of type 'clip', got 'clip_moe_vision_model'"),
        (tmp_path / "bare", "user/x", ".*has no tokenizer"),
    ):
        with pytest.raises(SystemExit, match=f"error: {message}"):
            publish.main([str(source), name, "--dry_run", str(tmp_path / "a")])
    assert not (tmp_path / "a").exists()


def test_a_folder_of_an_earlier_version_still_computes_the_same(tmp_path):
    """The archive was published once, with the code beside it, and stays as it is."""
    shutil.unpack_archive(ROOT / "tests" / "frozen_clip_moe.tar.gz", tmp_path / "frozen")
    assert "'vision features'" in run_program(tmp_path, "-c", SELF_TEST, tmp_path / "frozen", "main")


def test_the_self_test_sees_any_weight():
    """1 % more of one tensor: the error names what differs, by how much, and the versions on both sides."""
    model = AutoModel.from_pretrained("training/name_clip_moe", dtype=torch.float32)
    parts = {"text": "text features", "vision": "vision features", "visual": "vision features", "logit": "logits"}
    versions = f"made with transformers 5.*, here are transformers {transformers.__version__} and torch"
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # which changes no attention
            continue
        before, part = parameter.detach().clone(), parts[name.split("_")[0]]
        parameter.data.mul_(1.01)
        with pytest.raises(ValueError, match=f"name_clip_moe failed its self-test: the {part} differ by .* {versions}"):
            model.self_test()
        parameter.data.copy_(before)
    assert max(model.self_test().values()) < 1e-6


@torch.no_grad()
def test_the_self_test_sees_every_expert_and_every_token():
    """Also those that its inputs do not reach, one at a time."""
    model = AutoModel.from_pretrained("training/name_clip_moe", dtype=torch.float32)
    tokens = model.text_model.get_input_embeddings().weight
    tables = [(tokens, -3, row) for row in range(0, len(tokens), 37)]
    for block in sparse_blocks(model).values():
        parts = (*block.experts.parameters(), block.router.weight)
        tables += [(part, 1.5, row) for part in parts for row in range(len(part))]
    sums, outputs = weight_sums(model), every_expert(model)
    for table, factor, row in tables:
        before = table[row].clone()
        table[row] *= factor
        sum_error = ((weight_sums(model) - sums) / sums).abs().max()
        expert_error = ((every_expert(model) - outputs).norm(dim=1) / outputs.norm(dim=1)).max()
        assert sum_error > SUM_TOLERANCE or expert_error > TOLERANCE, (table.shape, row)
        table[row] = before
    tokens[7] *= -3
    with pytest.raises(ValueError, match="failed its self-test: the .* differ by"):
        model.self_test()


VOCABULARY = json.loads((ROOT / "training/name_clip_moe/tokenizer.json").read_text())["model"]["vocab"]
# Which no text of the self-test has
FIRST, SECOND = list(VOCABULARY)[600:602]
IMAGES = {
    "mean": ({"image_mean": [0.48, 0.46, 0.41]}, "vision features through the"),
    "std": ({"image_std": [0.5, 0.5, 0.51]}, "vision features through the"),
    "scale": ({"rescale_factor": 1 / 256}, "vision features through the"),
    "filter": ({"resample": 0}, "resizing 0"),
    "no resizing": ({"do_resize": False}, "resizing 0"),
}
EXCHANGED = {"vocab": {FIRST: VOCABULARY[SECOND], SECOND: VOCABULARY[FIRST]}}
FAULTS = {
    "vocabulary": ("tokenizer.json", {"model": EXCHANGED}, "vocabulary 0"),
    "merges": ("tokenizer.json", {"model": {"merges": []}}, "tokens 0"),
    "length": ("tokenizer_config.json", {"model_max_length": 5}, "tokens 0"),
    "padding": ("tokenizer_config.json", {"padding_side": "left"}, "tokens 0"),
}
FAULTS |= {
    name: ("processor_config.json", {"image_processor": change}, part) for name, (change, part) in IMAGES.items()
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_sees_another_processor(tmp_path, fault):
    folder, (name, changes, message) = shutil.copytree("training/name_clip_moe", tmp_path / "folder"), FAULTS[fault]
    change_json(folder / name, **changes)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"failed its self-test: the {message}"):
        model.self_test()


def test_a_folder_that_computes_something_else_is_refused(repository, tmp_path):
    folder = shutil.copytree(repository, tmp_path / "folder")
    changed = weights(folder)
    changed["visual_projection.weight"] *= 1.01
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="cannot be used without this package: .*failed its self-test: the vision"):
        bundle.verify(folder)


# --- the examples of published cards, run as they stand


def run_examples(folder, number, place, image):
    """Runs the Python of a card in a folder where what it names is there; code that does not name the package, without
    it."""
    found = re.findall(r"```python\n(.*?)```", ModelCard.load(folder / "README.md").text, flags=re.DOTALL)
    assert len(found) == number
    (place / "image.png").symlink_to(image)
    with_package = [code for code in found if "modeling_clip_moe" in code]
    run_program(place, "-c", "\n".join([WITHOUT_PACKAGE, *(code for code in found if code not in with_package)]))
    if with_package:
        run_program(place, "-c", "\n".join(with_package))


def test_examples_run(repository, image, tmp_path):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "clip-moe-symbols").symlink_to(repository)
    run_examples(repository, 5, tmp_path, image)


@pytest.mark.parametrize(("name", "number"), [("dense", 4), ("mode", 2)])
def test_examples_of_other_models_run(name, number, image, tmp_path, unverified):
    dense, source = CLIPModel.from_pretrained(BASE), BASE
    if name == "mode":
        source = tmp_path / "mode"
        CLIPMoDEModel.from_experts([dense, dense]).save_pretrained(source)
        AutoProcessor.from_pretrained(BASE).save_pretrained(source)
    publish.main([str(source), f"user/{name}", "--dry_run", str(tmp_path / "user" / name)])
    run_examples(tmp_path / "user" / name, number, tmp_path, image)
    if name == "dense":  # which needs no code
        card = (tmp_path / "user" / "dense" / "README.md").read_text()
        assert not list((tmp_path / "user" / "dense").glob("*.py")) and "A CLIP without sparse layers." in card
        assert "trust_remote_code" not in card and "custom_code" not in card
