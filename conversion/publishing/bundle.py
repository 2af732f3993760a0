"""The folder that is published of a model: weights, code, processor, card, scores; and the check that it loads."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer, PreTrainedModel

from conversion.assemble import ENCODER
from conversion.checkpoints import load_clip, load_config, load_mixture
from conversion.processors import forget_last_call, load_processor
from conversion.publishing.card import render
from conversion.publishing.lineage import Lineage
from conversion.publishing.trusted_code import CODE, named_code, require_trusted_code, settings_files, trusted_copy
from conversion.verification import check_equal, sample_inputs
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel
from records.files import read_json, save, write_text, writing
from records.local_names import is_hub_name

# Keys of configurations that say where they were loaded from on this machine, and files there
LOCAL_KEYS = {"is_local", "local_files_only", "name_or_path", "_name_or_path"}
LOCAL_KEYS |= {"tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}
SHARD = "5GB"  # the largest file of weights
LICENSE = Path(__file__).parents[2] / "LICENSE"


def features(model, inputs):
    """The embeddings that a model computes of one dictionary of inputs, or a mixture of one for each expert."""
    texts = [{"input_ids": part["input_ids"]} for part in inputs]
    images = [{name: tensor for name, tensor in part.items() if name != "input_ids"} for part in inputs]
    texts, images = ({"expert_inputs": parts} if len(parts) > 1 else parts[0] for parts in (texts, images))
    with torch.no_grad():
        texts, images = model.get_text_features(**texts), model.get_image_features(**images)
    return {"texts": texts.pooler_output.contiguous(), "images": images.pooler_output.contiguous()}


def build(
    source: str | Path, folder: Path, repository: str, license: str | None = None, base_model: str | None = None
) -> None:
    """Write what is published of a model into a folder, and verify it.

    Args:
        source: folder of a dense or sparse model of a family, or of a `CLIPMoDEModel`, with its processor; of a
            recipe's stage, for a card that tells how it was made.
        repository: its name on the Hub, which the card's examples load.
        license: the weights' license, as the Hub names it. None: unknown, which the card says.
        base_model: name on the Hub of the dense model that it comes from; None: as the recipe has it.
    """
    validate_repo_id(repository)
    if base_model is not None and not is_hub_name(base_model):
        raise ValueError(f"--base-model {base_model} is no name on the Hub, or a folder here: give user/name")
    model = copy_model(Path(source), folder)
    lineage = Lineage.of(Path(source))
    if not lineage.results:
        print(
            f"warning: no scores of {source} are published: a card shows those of a recipe's stage alone, by a stage "
            "evaluate, or by clip-moe evaluate into a folder of its run",
            file=sys.stderr,
        )
    for name, picture in lineage.pictures.items():
        shutil.copy(picture, folder / name)
    for name, result in lineage.results.items():
        (folder / "results").mkdir(exist_ok=True)
        write_text(folder / "results" / name, json.dumps(result, indent=2, ensure_ascii=False))
    if lineage.recipe is not None:
        write_text(folder / "recipe.yaml", yaml.safe_dump(lineage.recipe, sort_keys=False))
    if list(folder.glob("*.py")):
        shutil.copy(LICENSE, folder / "LICENSE-CODE")
    experts = [load_config(folder, name) for name in model.config.experts] if isinstance(model, CLIPMoDEModel) else []
    tokenizer = folder / "tokenizer_config.json"
    longest_cut = read_json(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    card = render(model.config, lineage, repository, license, base_model, experts, longest_cut)
    card.save(folder / "README.md")
    verify(model, folder)


def copy_model(source: Path, folder: Path) -> PreTrainedModel:
    """Write a model, its processor and its encoder of metadata into another folder, and return the model. Other
    files in its folder, code that is not ours, and what is true on this machine alone stay behind."""
    with trusted_copy(source) as copy:
        model = load_mixture(copy) if isinstance(load_config(copy), CLIPMoDEConfig) else load_clip(copy)
        save(model, folder, max_shard_size=SHARD)
        for part in model.config.experts if getattr(model.config, "own_processors", False) else [""]:
            write_processor(copy / part, folder / part)
        write_encoder(copy / ENCODER, folder / ENCODER)
    forget_this_machine(folder)
    return model


def write_processor(source: Path, folder: Path) -> None:
    """Save a processor with the files that older programs look for: `preprocessor_config.json`, and of CLIP's
    tokenizer `vocab.json` and `merges.txt`."""
    processor = load_processor(source)
    forget_last_call(processor.tokenizer)
    save(processor, folder)
    save(processor.image_processor, folder)  # preprocessor_config.json
    if isinstance(processor.tokenizer, CLIPTokenizer):
        with writing(folder):
            processor.tokenizer.backend_tokenizer.model.save(str(folder))


def write_encoder(source: Path, folder: Path) -> None:
    """Copy the encoder of a mixture's metadata, if there is one: settings, vocabulary and safetensors."""
    if source.is_dir():
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.bin"))  # pickles
        for path in settings_files(folder):
            for name in named_code(read_json(path)):
                shutil.copy(CODE[name], path.parent)


def forget_this_machine(folder: Path) -> None:
    """Remove from configurations what is true on this machine alone."""

    def without_local(part: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key not in LOCAL_KEYS}

    for path in settings_files(folder):
        before = read_json(path)
        settings = json.loads(json.dumps(before), object_hook=without_local)
        if path.name == "encoder.json" and (path.parent / "model").is_dir() and "source" in settings:
            settings["source"] = Path(str(settings["source"])).name  # of a folder that was here
        if settings != before:
            write_text(path, json.dumps(settings, indent=2, ensure_ascii=False))


def _check() -> str:
    """The program of another process, which computes features from the published folder alone."""
    return f"""
import sys
sys.modules["modeling_clip_moe"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
{inspect.getsource(features)}
folder, outputs, *inputs = sys.argv[1:]
model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
save_file(features(model, [load_file(path) for path in inputs]), outputs)
"""


def verify(model: PreTrainedModel, folder: Path) -> None:
    """Compare the features of a model with those that a process without this package computes from a folder."""
    require_trusted_code(folder)  # the other process trusts it
    configs = [model.config]
    if isinstance(model, CLIPMoDEModel):
        readers = model.num_experts if model.config.own_processors else 1
        configs = [model.expert(number).config for number in range(readers)]
    inputs = [sample_inputs(config) for config in configs]
    with tempfile.TemporaryDirectory() as parent:
        files = [f"{parent}/inputs_{number}" for number in range(len(inputs))]
        for part, file in zip(inputs, files, strict=True):
            save_file(part, file)
        expected = features(model.float().eval(), inputs)
        # Another folder for the code, so that none is used that was loaded before
        environment = {**os.environ, "HF_MODULES_CACHE": f"{parent}/modules", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", _check(), str(folder.resolve()), f"{parent}/outputs", *files]
        # In another folder, since Python imports from the one that it is started in
        result = subprocess.run(command, env=environment, cwd=parent, capture_output=True, text=True)
        if result.returncode != 0:
            reason = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise ValueError(f"the folder does not load without this package: {reason[-1]}")
        computed = load_file(f"{parent}/outputs")
    check_equal(expected, computed, 1e-5)
