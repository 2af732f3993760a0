"""The examples of published cards, run as they stand."""

import re

import pytest
from huggingface_hub import ModelCard
from programs import WITHOUT_PACKAGE, run_program
from transformers import AutoProcessor, CLIPModel

from clip_moe.conversion.commands import publish
from clip_moe.conversion.publishing import bundle
from modeling_clip_moe import CLIPMoDEModel

BASE = "training/symbol_clip"


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
def test_examples_of_other_models_run(name, number, image, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "verify", lambda folder: None)  # the examples run in other processes, too
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
