"""Small stand-ins for the checkpoints, images and Hub repositories that README and docs name. `make_folder` makes a
folder with all files, like a checkout; `on_and_offline` puts the repositories on the local Hub."""

import functools
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from benchmark_folders import make_copy
from converters import save_llava
from documents import BASE, ROOT
from local_hub import LocalHub, contents
from openai_weights import openai_state_dict
from plain_moe_vie import RELEASED, random_weights
from tiny_families import saved, tiny_dense
from transformers import AutoProcessor, AutoTokenizer, CLIPModel, CLIPTextModel, CLIPTextModelWithProjection

from clip_moe.conversion.long_context import POSITIONS
from clip_moe.conversion.openai import build
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.released_clip_moe import export
from clip_moe.conversion.upcycle import upcycle
from clip_moe.data.symbols import SYMBOLS
from modeling_clip_moe.families import FAMILY_OF_TYPE

SHORT = 77


def with_77_positions(model):
    """The symbol CLIP has 64: repeats the last ones."""
    state = model.state_dict()
    table = state[POSITIONS]
    state[POSITIONS] = torch.cat([table, table[len(table) - SHORT :]])
    model.config.text_config.max_position_embeddings = SHORT
    longer = type(model)(model.config)
    longer.load_state_dict(state)
    return longer


def save_clip(folder: Path) -> None:
    """The symbol CLIP with the positions of OpenAI's."""
    with_77_positions(CLIPModel.from_pretrained(BASE)).save_pretrained(folder)
    AutoProcessor.from_pretrained(BASE).save_pretrained(folder)


def openai_weights() -> dict[str, torch.Tensor]:
    """Random weights under OpenAI's names, for the symbols' tokenizer and images."""
    state = openai_state_dict((64, 64), (1, 1), 8, 32, 16)
    words = len(AutoTokenizer.from_pretrained(BASE))
    state["token_embedding.weight"] = torch.randn(words, 64, generator=torch.Generator().manual_seed(0))
    return state | {"vocab_size": torch.tensor(words)}


def save_released(file: Path) -> None:
    """A checkpoint in the layout of CLIP-MoE's authors."""
    torch.save(export(upcycle(build(openai_weights()), PRESETS["clip_moe"])), file)


def save_moe_vie(folder: Path) -> None:
    """Random weights as wide as MoE-ViE-B/16's image tower, by which its size is known, of two thin layers."""
    sizes = replace(RELEASED["B/16"], layers=2, ffn=16, expert=8, text_width=32, text_layers=1, text_ffn=16)
    sizes = replace(sizes, embedding=16, vocabulary=len(AutoTokenizer.from_pretrained(BASE)))
    folder.mkdir()
    torch.save(random_weights(sizes, dtype=torch.float32), folder / "MoEViE-B16-224.pt")


def save_images(folder: Path, count: int = 8) -> None:
    """A folder of images, with captions and labels in a file beside them."""
    lines = []
    folder.mkdir()
    for number, row in enumerate(SYMBOLS.load("train", "detailed", count)):
        name = f"{number:04}.png"
        row["image"].save(folder / name)
        lines.append(json.dumps({"file_name": name, "caption": row["caption"], "label": row["kind"]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def save_siglip(folder: Path) -> None:
    """A SigLIP 2 with texts as long as those of the released ones."""
    siglip = FAMILY_OF_TYPE["siglip"]
    saved(siglip, tiny_dense(siglip, length=64), folder, length=64)


def save_old_clip(folder: Path) -> None:
    """In the layout of OpenAI's oldest repositories: pickled weights with the numbers of positions, an image processor
    in a file of its own, and no safetensors."""
    save_clip(folder)
    model, processor = CLIPModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    towers = {"text_model": model.config.text_config.max_position_embeddings}
    towers["vision_model"] = model.vision_model.embeddings.num_positions
    numbers = {f"{tower}.embeddings.position_ids": torch.arange(n)[None] for tower, n in towers.items()}
    torch.save(model.state_dict() | numbers, folder / "pytorch_model.bin")
    for name in ("model.safetensors", "processor_config.json"):
        (folder / name).unlink()
    images = processor.image_processor
    settings = {f"do_{step}": True for step in ("center_crop", "normalize", "resize")}
    size = images.size["height"]
    settings |= {"size": size, "crop_size": size, "resample": 3, "feature_extractor_type": "CLIPFeatureExtractor"}
    settings |= {name: list(getattr(images, name)) for name in ("image_mean", "image_std")}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def save_sparse(folder: Path) -> None:
    upcycle(with_77_positions(CLIPModel.from_pretrained(BASE)), PRESETS["clip_moe"]).save_pretrained(folder)
    AutoProcessor.from_pretrained(BASE).save_pretrained(folder)


def save_symbol_llava(folder: Path) -> None:
    save_llava(folder, CLIPModel.from_pretrained(BASE), AutoProcessor.from_pretrained(BASE))


def save_sdxl(folder: Path) -> None:
    from integration.tiny_models import sdxl  # imports diffusers

    dense = with_77_positions(CLIPModel.from_pretrained(BASE))
    with tempfile.TemporaryDirectory() as whole:
        dense.save_pretrained(whole)
        sdxl(*(tower.from_pretrained(whole) for tower in (CLIPTextModel, CLIPTextModelWithProjection))).save_pretrained(
            folder
        )


def save_benchmark(folder: Path) -> None:
    make_copy(folder.name, folder)


# Name of a repository in a page -> the function that makes its files
ON_HUB = {
    "openai/clip-vit-base-patch16": save_clip,
    "openai/clip-vit-base-patch32": save_old_clip,
    "openai/clip-vit-large-patch14": save_clip,
    "openai/clip-vit-large-patch14-336": save_clip,
    "facebook/MoEViE-B16-224": save_moe_vie,
    "google/siglip2-base-patch16-224": save_siglip,
    "llava-hf/llava-1.5-7b-hf": save_symbol_llava,
    "stabilityai/stable-diffusion-xl-base-1.0": save_sdxl,
    "user/clip": save_clip,
    "user/clip-moe": save_sparse,
    "user/clip-moe-l14": save_sparse,
    "user/clip-moe-l14-336": save_sparse,
}
# Name of anything else in a page -> the function that makes it
STAND_INS = {
    "image.png": lambda file: SYMBOLS.load("test", "detailed", 1)[0]["image"].save(file),
    "expert-1": save_clip,
    "expert-2": save_clip,
    "expert-3": save_clip,
    "ViT-B-32.pt": lambda file: torch.save(openai_weights(), file),
    "clip-moe-4-2-sharegpt4v.pt": save_released,
    "my/images/train": save_images,
    "my/images/test": save_images,
    "my/photos": functools.partial(save_images, count=40),
    "my/benchmarks/mmvp_vlm": save_benchmark,
    "my/benchmarks/urban1k": save_benchmark,
    "training": lambda folder: folder.symlink_to(ROOT / "training"),
}


@functools.cache
def repository(name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "repository"
        ON_HUB[name](folder)
        return contents(folder)


def on_and_offline(hub: LocalHub, text: str) -> Iterator[str]:
    """Puts the repositories that a text names on the Hub, and yields "online"; where there are some, then "offline",
    with a Hub that is gone."""
    names = [name for name in ON_HUB if re.search(rf"{re.escape(name)}(?![\w-])", text)]
    for name in names:
        hub.put(name, repository(name))
    hub.online(bool(names) or not text)  # other texts need no Hub, and libraries that ask it fail
    yield "online"
    if names:
        hub.clear()
        hub.online(False)
        yield "offline"


def make_folder(folder: Path) -> None:
    for name, make in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(folder / name)
