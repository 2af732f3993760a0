"""What the pages of README and docs name and this machine lacks, under the same names and small: models of the Hub,
checkpoints, images. `make_folder` makes a folder that looks like a checkout in which these lie."""

import json
from pathlib import Path

import torch
from benchmark_folders import make_copy
from openai_weights import as_released, openai_state_dict
from tiny_families import saved, tiny_dense
from transformers import AutoProcessor, AutoTokenizer, CLIPModel

from conversion.long_context import POSITIONS
from data import symbols
from evaluation.benchmarks.specs import BENCHMARKS
from modeling_clip_moe.families import FAMILY_OF_TYPE

ROOT = Path(__file__).parents[1]
BASE = ROOT / "training" / "symbol_clip"
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


def save_openai(file: Path) -> None:
    torch.save(openai_weights(), file)


def save_released(file: Path) -> None:
    """A checkpoint in the layout of CLIP-MoE's authors, with two experts."""
    torch.save(as_released(openai_weights()), file)


def save_images(folder: Path) -> None:
    """A folder of images, with captions and labels in a file beside them."""
    lines = []
    folder.mkdir()
    for number, row in enumerate(symbols.load("train", "detailed", 8)):
        name = f"{number:04}.png"
        row["image"].save(folder / name)
        lines.append(json.dumps({"file_name": name, "caption": row["caption"], "label": row["kind"]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def save_siglip(folder: Path) -> None:
    """A SigLIP 2 with texts as long as those of the released ones."""
    siglip = FAMILY_OF_TYPE["siglip"]
    saved(siglip, tiny_dense(siglip, length=64), folder, length=64)


def save_benchmark(folder: Path) -> None:
    benchmark = BENCHMARKS[folder.name]
    make_copy(benchmark, benchmark.layouts[0], folder)


# Name in a page -> what makes it
STAND_INS = {
    "openai/clip-vit-base-patch16": save_clip,
    "openai/clip-vit-base-patch32": save_clip,
    "openai/clip-vit-large-patch14": save_clip,
    "google/siglip2-base-patch16-224": save_siglip,
    "image.png": lambda file: symbols.load("test", "detailed", 1)[0]["image"].save(file),
    "expert-1": save_clip,
    "expert-2": save_clip,
    "expert-3": save_clip,
    "ViT-B-32.pt": save_openai,
    "clip-moe-4-2-sharegpt4v.pt": save_released,
    "my/images/train": save_images,
    "my/images/test": save_images,
    "my/benchmarks/mmvp_vlm": save_benchmark,
    "my/benchmarks/urban1k": save_benchmark,
    "user/clip-moe": lambda folder: folder.symlink_to("../runs/clip_moe_demo/clip_moe"),  # made with the pages
    "training": lambda folder: folder.symlink_to(ROOT / "training"),
}


def make_folder(folder: Path) -> None:
    for name, make in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(folder / name)
