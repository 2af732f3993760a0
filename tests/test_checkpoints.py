"""conversion/checkpoints.py: what is refused where a source is opened, and that no code of a source runs."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch
from converters import run, sources
from tiny_clip import change_json, change_weights
from transformers import CLIPModel

from clip_moe.conversion.checkpoints import load_config, load_mixture, load_model
from clip_moe.evaluation.sentence_encoders import open_encoder
from modeling_clip_moe import CLIPMoDEModel, CLIPMoEModel

sources  # noqa: B018, a fixture


@pytest.fixture
def copy(sources, tmp_path):
    """A place with copies of the sources that may be damaged."""
    return shutil.copytree(sources, tmp_path / "sources")


class Planted:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_planted_pickle_does_not_run(copy, tmp_path):
    ran = tmp_path / "ran"
    for name in ("dense", "sparse", "mixture/expert_0"):
        (copy / name / "model.safetensors").unlink()
        torch.save({"logit_scale": Planted(ran)}, copy / name / "pytorch_model.bin")
    torch.save({"logit_scale": Planted(ran)}, copy / "archive.pt")
    with (copy / "plain.pt").open("wb") as file:
        pickle.dump({"logit_scale": Planted(ran)}, file)
    for command in ("upcycle", "dense", "average", "assemble", "unify", "long-context", "llava"):
        error = run(command, copy, tmp_path / "out")
        assert "a weight file is damaged or holds more than tensors" in error
    for archive in ("archive.pt", "plain.pt"):
        shutil.copy(copy / archive, copy / "openai.safetensors")
        assert run("openai", copy, tmp_path / "out").startswith("error: ")
    with pytest.raises(ValueError, match="holds more than tensors"):
        load_mixture(copy / "mixture")
    for model_class, name in ((CLIPModel, "dense"), (CLIPMoEModel, "sparse"), (CLIPMoDEModel, "mixture")):
        with pytest.raises(pickle.UnpicklingError):  # transformers' own, without a converter around it
            model_class.from_pretrained(copy / name)
    assert not ran.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("known", [False, True])
def test_code_beside_a_source_does_not_run(copy, tmp_path, known, monkeypatch, capsys):
    """Not even where somebody says yes to what transformers would ask."""
    (copy / "dense" / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import CLIPConfig as Config, CLIPModel as Model, CLIPTokenizer as Tokenizer\n"
    )
    code = {"AutoConfig": "planted.Config", "AutoModel": "planted.Model", "AutoTokenizer": ["planted.Tokenizer"] * 2}
    for file in ("config.json", "tokenizer_config.json", "processor_config.json"):
        change_json(copy / "dense" / file, auto_map=code)
    if not known:
        change_json(copy / "dense" / "config.json", model_type="planted")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    error = run("upcycle", copy, tmp_path / "out")
    assert error is None if known else "trust_remote_code=True" in error
    assert "[y/N]" not in capsys.readouterr().out and not (tmp_path / "ran").exists()


def test_modules_of_a_sentence_encoder_do_not_run(copy, tmp_path, monkeypatch):
    folder = copy / "dense"
    (folder / "planted.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "planted.Model"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=f"cannot load {folder}: .*'planted.Model', which is not part of"):
        open_encoder(str(folder))
    monkeypatch.setattr("clip_moe.engine.provenance.version", lambda package: "5.7.0")
    with pytest.raises(ValueError, match="pip install 'sentence-transformers>=6', not 5.7.0"):
        open_encoder(str(folder))
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_not_finite(copy, tmp_path):
    table = "text_model.embeddings.token_embedding.weight"
    change_weights(copy / "dense" / "model.safetensors", lambda state: state[table][3].fill_(torch.nan))
    assert f"dense does not fit: not finite: {table}" in run("average", copy, tmp_path / "out")


def test_old_and_half_precision_sources_load_as_before(copy, tmp_path):
    """The Hub's CLIPs hold position ids; half precision stays what it is."""
    path = copy / "dense" / "model.safetensors"
    ids = {f"{tower}.embeddings.position_ids": torch.arange(5)[None] for tower in ("text_model", "vision_model")}
    change_weights(path, lambda state: state.update(ids))
    assert run("upcycle", copy, tmp_path / "out") is None
    CLIPModel.from_pretrained(copy / "dense", dtype=torch.bfloat16).save_pretrained(copy / "dense")
    assert load_model(CLIPModel, copy / "dense").dtype == torch.bfloat16


OF_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")


@pytest.mark.parametrize("key", [*OF_KERNELS, "text_config.attn_implementation", "vision_config.attn_implementation"])
def test_kernels_are_refused_everywhere(copy, key):
    """transformers would fetch and run them, trusted or not, whatever opens a model."""
    tower, _, field = key.rpartition(".")
    named = {field: "evil/kernel"}
    message = "names the kernel 'evil/kernel', third-party code"
    for name in ("dense", "sparse", "mixture/expert_1"):
        change_json(copy / name / "config.json", **({tower: named} if tower else named))
        with pytest.raises(ValueError, match=message):
            load_config(copy / name)
    with pytest.raises(ValueError, match=message):
        load_mixture(copy / "mixture")
    assert run("upcycle", copy, copy / "out").count("cannot load ") == 1
