"""conversion/checkpoints.py: what is refused where a source is opened, and that no code of a source runs."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from converters import COMMANDS, run, sources
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from tiny_clip import WORDS
from transformers import CLIPModel

from conversion.checkpoints import load_clip, load_mixture, load_model
from conversion.folders import load_config
from conversion.processors import load_processor
from evaluation.sentence_encoders import TfidfEncoder, load_encoder, open_encoder
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


def plant(folder, ran):
    (folder / "model.safetensors").unlink()
    torch.save({"logit_scale": Planted(ran)}, folder / "pytorch_model.bin")


def change_weights(path, change):
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_planted_pickle_does_not_run(copy, tmp_path):
    ran = tmp_path / "ran"
    for name in ("dense", "sparse", "mixture/expert_0"):
        plant(copy / name, ran)
    torch.save({"logit_scale": Planted(ran)}, copy / "archive.pt")
    with (copy / "plain.pt").open("wb") as file:
        pickle.dump({"logit_scale": Planted(ran)}, file)
    for command in ("upcycle", "dense", "average", "assemble", "unify", "long_context", "llava"):
        error = run(command, copy, tmp_path / "out")
        assert "pytorch_model.bin is damaged or holds more than tensors, and was not loaded" in error
    for archive in ("archive.pt", "plain.pt"):
        shutil.copy(copy / archive, copy / "openai.safetensors")
        assert run("openai", copy, tmp_path / "out").startswith("error: ")
    with pytest.raises(ValueError, match="holds more than tensors, and was not loaded"):
        load_mixture(copy / "mixture", max_loaded_experts=1)
    for model_class, name in ((CLIPModel, "dense"), (CLIPMoEModel, "sparse"), (CLIPMoDEModel, "mixture")):
        with pytest.raises(pickle.UnpicklingError):  # transformers' own, without a converter around it
            model_class.from_pretrained(copy / name)
    assert not ran.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("known", [False, True])
def test_code_beside_a_source_does_not_run(copy, tmp_path, known):
    """Not even where somebody says yes to what transformers would ask."""
    (copy / "dense" / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import CLIPConfig as Config, CLIPModel as Model, CLIPTokenizer as Tokenizer\n"
    )
    code = {"AutoConfig": "planted.Config", "AutoModel": "planted.Model", "AutoTokenizer": ["planted.Tokenizer"] * 2}
    for file in ("config.json", "tokenizer_config.json", "processor_config.json"):
        change_json(copy / "dense" / file, lambda content: content.update(auto_map=code))
    if not known:
        change_json(copy / "dense" / "config.json", lambda content: content.update(model_type="planted"))
    command = [sys.executable, "-m", "conversion.upcycle", copy / "dense", tmp_path / "out", "--preset", "clip_moe"]
    result = subprocess.run(command, input="y\n", capture_output=True, text=True)
    assert (result.returncode == 0) == known
    assert "Traceback" not in result.stderr and "[y/N]" not in result.stdout
    assert known or "trust_remote_code=True" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


def test_modules_of_a_sentence_encoder_do_not_run(copy, tmp_path, monkeypatch):
    folder = copy / "dense"
    (folder / "planted.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "planted.Model"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=f"cannot load {folder}: .*'planted.Model', which is not part of"):
        open_encoder(str(folder))
    monkeypatch.setattr("sentence_transformers.__version__", "5.7.0")
    with pytest.raises(ValueError, match="sentence-transformers 5.7.0 runs code of the folders that it loads"):
        open_encoder(str(folder))
    assert not (tmp_path / "ran").exists()


TABLE = "text_model.embeddings.token_embedding.weight"
UNFIT = {
    "a row": (lambda t: t.index_fill(0, torch.tensor(3), torch.nan), "has 1 of 40 rows that are not finite"),
    "int8": (lambda t: t.to(torch.int8), "is of int8, not of floating point: take the model as it was before"),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), "is of float8_e4m3fn, not of floating point"),
}


@pytest.mark.parametrize("change, message", UNFIT.values(), ids=UNFIT)
def test_weights_that_nothing_can_be_computed_with(copy, tmp_path, change, message):
    for name in ("dense", "sparse", "heads_of_64", "mixture/expert_1"):
        change_weights(copy / name / "model.safetensors", lambda state: state.update({TABLE: change(state[TABLE])}))
    key = TABLE.removeprefix("text_model.embeddings.")
    for name in ("openai", "released"):
        change_weights(copy / f"{name}.safetensors", lambda state: state.update({key: change(state[key])}))
    for command in set(COMMANDS) - {"llava"}:
        assert f"token_embedding.weight {message}" in run(command, copy, tmp_path / "out"), command
    assert f"cannot load {copy / 'sparse'}: {TABLE} {message}" in run("llava", copy, tmp_path / "out")
    with pytest.raises(ValueError, match=f"expert_1: {TABLE} {message}"):
        load_mixture(copy / "mixture", max_loaded_experts=1)
    with pytest.raises(ValueError, match=f"{TABLE} {message}"):
        load_clip(copy / "sparse")
    assert not (tmp_path / "out").exists()


def test_one_number_and_shards(copy, tmp_path):
    model = CLIPModel.from_pretrained(copy / "dense")
    model.logit_scale.data.fill_(torch.nan)
    model.save_pretrained(copy / "dense", max_shard_size="20KB")
    (copy / "dense" / "model.safetensors").unlink(missing_ok=True)
    assert "logit_scale has 1 of 1 values that are not finite" in run("upcycle", copy, tmp_path / "out")
    model.logit_scale.data.fill_(1.0)
    model.save_pretrained(copy / "dense", max_shard_size="20KB")
    assert run("upcycle", copy, tmp_path / "out") is None
    index = copy / "dense" / "model.safetensors.index.json"
    shard = json.loads(index.read_text())["weight_map"][TABLE]
    shutil.move(copy / "dense" / shard, copy)
    change_json(index, lambda content: content["weight_map"].update({TABLE: f"../{shard}"}))
    assert "which is not a file beside it" in run("upcycle", copy, tmp_path / "other")
    change_json(index, lambda content: content["weight_map"].update({TABLE: shard}))
    assert f"does not appear to have a file named {shard}" in run("upcycle", copy, tmp_path / "other")


def test_old_and_half_precision_sources_load_as_before(copy, tmp_path):
    """The Hub's CLIPs hold position ids; half precision stays what it is."""
    path = copy / "dense" / "model.safetensors"
    ids = {f"{tower}.embeddings.position_ids": torch.arange(5)[None] for tower in ("text_model", "vision_model")}
    change_weights(path, lambda state: state.update(ids))
    assert run("upcycle", copy, tmp_path / "out") is None
    CLIPModel.from_pretrained(copy / "sparse/../dense", dtype=torch.bfloat16).save_pretrained(copy / "dense")
    assert load_model(CLIPModel, copy / "dense").dtype == torch.bfloat16


def test_a_source_without_a_processor(copy):
    (copy / "dense" / "processor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="dense has no image processor; copy"):
        load_processor(copy / "dense")
    (copy / "dense" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="dense has no tokenizer; copy"):
        load_processor(copy / "dense")


def test_quantized_sources_are_refused(copy, tmp_path):
    quantization = {"quantization_config": {"quant_method": "torchao", "quant_type": "int8"}}
    change_json(copy / "dense" / "config.json", lambda content: content.update(quantization))
    assert "dense: it is quantized: take the model as it was before" in run("upcycle", copy, tmp_path / "out")


@pytest.mark.parametrize("name", ["dense", "sparse"])
@pytest.mark.parametrize(
    "tower, field, value, message",
    [
        ("vision_config", "patch_size", 17, r"patch_size must be at most image_size \(16\), got 17"),
        ("vision_config", "hidden_size", -32, "hidden_size of vision_config must be .* got -32"),
        ("text_config", "hidden_act", "nope", "hidden_act must be an activation that transformers knows, got 'nope'"),
        ("text_config", "eos_token_id", 40, r"eos_token_id, .*, must be below vocab_size \(40\), got 40"),
    ],
)
def test_impossible_configurations(copy, name, tower, field, value, message):
    change_json(copy / name / "config.json", lambda content: content[tower].update({field: value}))
    with pytest.raises(ValueError, match=f"cannot load {copy / name}: .*{message}"):
        load_config(copy / name)


def test_a_block_that_is_missing_far_up(copy, tmp_path):
    """A number in a tensor's name is no reason to build as many layers."""
    block = "transformer.resblocks.99999999.ln_1.bias"
    change_weights(copy / "openai.safetensors", lambda state: state.update({block: torch.zeros(64)}))
    assert "resblocks.1 is missing: there are blocks up to 99999999" in run("openai", copy, tmp_path / "out")


@pytest.mark.parametrize("change", [lambda idf: idf[1:], lambda idf: np.append(idf[1:], np.nan)])
def test_a_tfidf_that_does_not_fit_its_words(tmp_path, change):
    TfidfEncoder.fit(WORDS, len(WORDS), seed=0).save(tmp_path)
    assert load_encoder(tmp_path).encode(["red"]).any()
    arrays = load_arrays(tmp_path / "tfidf.safetensors")
    save_arrays(arrays | {"idf": change(arrays["idf"])}, tmp_path / "tfidf.safetensors")
    with pytest.raises(ValueError, match="tfidf.safetensors does not fit its words, or holds numbers that are not"):
        load_encoder(tmp_path)


def named(key, value, tower=None):
    """Writes a setting of a configuration, or of one of its towers."""
    return "config.json", lambda content: (content if tower is None else content[tower]).update({key: value})


KERNEL = "names the kernel 'evil/kernel', code of others"


@pytest.mark.parametrize(
    ("damage", "message"),
    [  # transformers would fetch and run kernels, trusted or not, and load weights from wherever files say
        *((named(f"{kind}_implementation", "evil/kernel"), KERNEL) for kind in ("attn", "_attn", "experts")),
        *((named("attn_implementation", "evil/kernel", f"{kind}_config"), KERNEL) for kind in ("text", "vision")),
        (named("transformers_weights", "other.safetensors"), "transformers_weights names .*'other.safetensors'"),
        (("adapter_config.json", None), "adapter_config.json makes it an adapter .*merge it into that one"),
    ],
)
def test_what_others_would_run_or_load_is_refused_everywhere(copy, damage, message):
    """By all that opens a model: a dense one, a sparse one and an expert of a mixture."""
    file, change = damage
    for name in ("dense", "sparse", "mixture/expert_1"):
        if change is None:
            (copy / name / file).write_text('{"base_model_name_or_path": "evil/base"}')
        else:
            change_json(copy / name / file, change)
        with pytest.raises(ValueError, match=message):
            load_config(copy / name)
    with pytest.raises(ValueError, match=message):
        load_mixture(copy / "mixture")
    assert run("upcycle", copy, copy / "out").startswith("error: cannot load ")
