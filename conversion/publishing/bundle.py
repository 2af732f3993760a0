"""The folder that is published of a model: weights, code, processor, card, scores; and the check that it loads."""

import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
import yaml
from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers, validate_repo_id
from safetensors.torch import save_file
from transformers import CLIPTokenizer, PreTrainedModel

from clip_moe.conversion.assemble import ENCODER
from clip_moe.conversion.checkpoints import load_clip, load_config, load_mixture
from clip_moe.conversion.processors import forget_last_call, load_processor
from clip_moe.conversion.publishing.card import render
from clip_moe.conversion.publishing.lineage import Lineage
from clip_moe.conversion.publishing.trusted_code import (
    CODE,
    CONTENT,
    SETTINGS_FILES,
    cleaned,
    files_like,
    missing_code,
    require_trusted_code,
)
from clip_moe.conversion.verification import sample_inputs
from clip_moe.engine.files import read_json, save, write_text, writing
from clip_moe.engine.local_names import is_hub_name
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel
from modeling_clip_moe.self_test import FILE as SELF_TEST
from modeling_clip_moe.self_test import compute, enlarged

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
# The self-test's two images: the most stored pixels a side, and the patches of images of any shape
SELF_TEST_SIZE, SELF_TEST_PATCHES = 48, 9


def build(
    source: str | Path, folder: Path, repository: str, license: str | None = None, base_model: str | None = None
) -> None:
    """Write what is published of a model into a folder, and verify it.

    Args:
        source: folder of a dense or sparse model of a family, or of a `CLIPMoDEModel`, with its processor; of a
            recipe's stage, for a card that tells how it was made.
        repository: its name on the Hub, which the card's examples load.
        license: the weights' license, as the Hub names it, or other:NAME. None: unknown, which the card says.
        base_model: name on the Hub of the dense model that it comes from; None: as the recipe has it.
    """
    validate_repo_id(repository)
    if base_model is not None and not is_hub_name(base_model):
        raise ValueError(f"--base_model {base_model} is not a Hub name, or is a local folder: give user/name")
    model = copy_model(Path(source), folder)
    lineage = Lineage.of(Path(source))
    if not lineage.results:
        print(
            f"warning: the card shows no scores of {source}. It takes those of an evaluate stage of the model's "
            "recipe, or of clip-moe evaluate into the folder of that run",
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
    tokenizer = folder / "tokenizer_config.json"  # a mixture's experts may have their own
    texts = read_json(tokenizer) if tokenizer.is_file() else {}
    options = {"longest_cut": texts.get("model_max_length"), "template": texts.get("hypothesis_template", "{}")}
    render(model.config, lineage, repository, license, base_model, experts, **options).save(folder / "README.md")
    write_self_test(model.float(), folder)
    verify(folder)


def publish(
    source: str | Path,
    repository: str,
    license: str | None = None,
    base_model: str | None = None,
    private: bool = False,
) -> str:
    """Build, verify and upload a model, see `build` and `upload`. Returns the address."""
    build_hf_headers(token=True)  # an error where nobody is logged in, before anything is built
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / repository.split("/")[-1]
        folder.mkdir()
        build(source, folder, repository, license, base_model)
        return upload(folder, repository, private)


def upload(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a folder in one commit, and create the repository, if it is not there, as a private one or not; returns
    the commit's address.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses; nothing of the folder is visible then.
        ConnectionError: it did not answer; again, nothing is visible.
    """
    api = HfApi()
    try:
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        return api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Publish the model").commit_url
    except (OSError, ValueError):  # the Hub's own answers are among them
        raise
    except Exception as error:  # those of the HTTP library, which is another one in other versions of huggingface_hub
        raise ConnectionError(f"the upload to {repository} was cut off, nothing of it is visible: {error}") from error


def copy_model(source: Path, folder: Path) -> PreTrainedModel:
    """Write a model, its processor and its encoder of metadata into another folder, and return the model. Other files,
    foreign code and names of this machine stay behind."""
    source.stat()  # an error where there is no such folder: it is never a name on the Hub
    is_mixture = isinstance(load_config(source), CLIPMoDEConfig)
    model = load_mixture(source) if is_mixture else load_clip(source)
    save(model, folder, max_shard_size="5GB")
    for part in model.config.experts if getattr(model.config, "own_processors", False) else [""]:
        write_processor(source / part, folder / part)
    if (source / ENCODER).is_dir():  # of a mixture's metadata
        write_encoder(source / ENCODER, folder / ENCODER)
    clean_settings(folder)
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
    """Copy an encoder of metadata: settings, vocabulary and safetensors."""
    for path in files_like(source, CONTENT):
        (target := folder / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def clean_settings(folder: Path) -> None:
    """Clean the settings in a folder, see `trusted_code.cleaned`, and put our code beside an encoder that needs it."""
    for path in files_like(folder, SETTINGS_FILES):
        settings = cleaned(read_json(path), path.relative_to(folder))
        if path.name == "encoder.json" and (path.parent / "model").is_dir() and "source" in settings:
            settings["source"] = Path(str(settings["source"])).name  # of a folder that was here
        write_text(path, json.dumps(settings, indent=2, ensure_ascii=False))
        for name in missing_code(settings, path.parent):
            shutil.copy(CODE[name], path.parent)


def write_self_test(model: PreTrainedModel, folder: Path) -> None:
    """Write inputs of at most 60 kB an expert, and what a model computes of them: see `modeling_clip_moe.self_test`."""
    configs, folders = [model.config], [folder]
    if isinstance(model, CLIPMoDEModel):
        readers = model.num_experts if model.config.own_processors else 1
        configs = [model.expert(number).config for number in range(readers)]
        folders = [folder / name for name in model.config.experts] if model.config.own_processors else folders
    stored, inputs, processors = {}, [], [load_processor(part) for part in folders]
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    for number, (config, processor) in enumerate(zip(copy.deepcopy(configs), processors, strict=True)):
        vision = config.vision_config
        is_fixed = (size := getattr(vision, "image_size", None)) is not None
        if not is_fixed:  # patches of images of any shape
            vision.num_patches = SELF_TEST_PATCHES
            size = vision.patch_size * math.isqrt(processor.image_processor.max_num_patches)
        side = next(side for side in range(1, size + 1) if size % side == 0 and size // side <= SELF_TEST_SIZE)
        if is_fixed:
            vision.image_size = size // side
        part = sample_inputs(config)
        part["picture"] = _picture(size // side)
        stored |= {f"{number}.{name}": tensor for name, tensor in part.items()}
        made_with[f"{number}.side"] = str(side)
        inputs.append(enlarged(part, side))
    stored |= {f"expected.{name}": tensor for name, tensor in compute(model, inputs, processors).items()}
    save_file(stored, folder / SELF_TEST, made_with)


def _picture(size: int) -> torch.Tensor:
    """(size, size, 3) of uint8: clouds of color with some noise, the same each time."""
    generator = torch.Generator().manual_seed(0)
    clouds = F.interpolate(torch.rand(1, 3, 4, 4, generator=generator), size=(size, size), mode="bilinear")
    noise = 0.1 * torch.randn(clouds.shape, generator=generator)
    return (255 * (clouds + noise).clamp(0, 1))[0].permute(1, 2, 0).to(torch.uint8).contiguous()


# The program of another process: the published folder has to pass its self-test there
_CHECK = """
import sys
sys.modules["modeling_clip_moe"] = None
import torch
from self_test import self_test
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
print(f"computes the same without this package: largest relative difference {max(self_test(model).values()):.2g}")
"""


def verify(folder: Path) -> None:
    """Run the self-test of a folder in a process without this package. Raises a ValueError where it fails."""
    require_trusted_code(folder)  # the other process trusts it
    with tempfile.TemporaryDirectory() as parent:
        # Python imports from the folder that it is started in: the test alone lies there, which dense models lack
        shutil.copy(CODE["self_test.py"], parent)
        # Another folder for the code, so that none is used that was loaded before
        environment = {**os.environ, "HF_MODULES_CACHE": f"{parent}/modules", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", _CHECK, str(folder.resolve())]
        result = subprocess.run(command, env=environment, cwd=parent, capture_output=True, text=True)
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise ValueError(f"the folder cannot be used without this package: {reason[-1]}")
    print(result.stdout, end="")
