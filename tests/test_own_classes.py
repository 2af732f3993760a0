"""`--import`: a class of one's own in every command, and in a folder that loads without this package."""

import json

import pytest
from documents import ROOT
from programs import run_program
from several_processes import run_processes

import clip_moe
from clip_moe.conversion.own_classes import import_models

IMPORT = ["--import", "examples.noisy_clip"]
# In a process that cannot import this package
LOAD = """
import sys
sys.path = [path for path in sys.path if path != sys.argv[1]]
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)
router = model.text_model.encoder.layers[1].mlp.router
print(type(model).__name__, type(router).__name__, "modeling_clip_moe" in sys.modules)
"""


@pytest.mark.slow
def test_a_class_of_ones_own_in_every_command(tmp_path):
    """In processes of their own: what is registered stays."""
    sparse, tuned = tmp_path / "sparse", tmp_path / "tuned"
    data = "--data.source", "symbols", "--data.num_samples", 16, "--global_batch_size", 8, "--max_steps", 2
    commands = [
        ("upcycle", sparse, *IMPORT, "--model", ROOT / "training/symbol_clip", "--preset", "clip_up"),
        ("train", tuned, "--model", sparse, *data, "--learning_rate", 1e-4, *IMPORT),
        ("publish", tuned, "user/noisy", "--dry_run", tmp_path / "there", "--license", "mit", *IMPORT),
    ]
    printed = [run_processes(1, clip_moe.main, [str(word) for word in command]) for command in commands]
    assert "\n    import examples.noisy_clip\n" in printed[0]  # how to load it
    assert json.loads((sparse / "config.json").read_text())["model_type"] == "noisy_clip"
    assert (tmp_path / "there" / "noisy_clip.py").is_file()
    loaded = run_program(tmp_path, "-I", "-c", LOAD, ROOT, tmp_path / "there")
    assert loaded.split() == ["NoisyCLIPModel", "NoisyRouter", "False"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "ModuleNotFoundError"),
        ("x = 1", "has no subclass of a whole sparse model"),
        (
            "import modeling_clip_moe\nfrom modeling_clip_moe import CLIPMoEModel\nclass Mine(CLIPMoEModel): pass",
            "Mine needs a model_type of its own: 'clip_moe' is another class's",
        ),
        (
            "import modeling_clip_moe\nfrom modeling_clip_moe import CLIPMoEModel, CLIPMoEConfig\n"
            "class MineConfig(CLIPMoEConfig):\n    model_type = 'mine'\n"
            "class MineModel(CLIPMoEModel):\n    config: MineConfig",
            "import from its files, as in `from modeling_clip_moe.sparse_moe import",
        ),
    ],
)
def test_what_cannot_be_imported_is_one_line(tmp_path, monkeypatch, code, message):
    name = f"mine_{abs(hash(message))}"
    if code is not None:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        import_models(name)


def test_the_option_needs_a_name():
    with pytest.raises(SystemExit, match="Empty module name"):
        clip_moe.main(["upcycle", "--import"])
