"""Pictures a second of `clip-moe embed`, beside loops over transformers' and open_clip's models of the same size.

python -m lab.speed.embedding --open_clip .venv/clip-benchmark --output lab/speed/results/embedding_cpu.md
"""

import io
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoProcessor, CLIPConfig, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_config
from clip_moe.data.arguments import DataArguments
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.command_line import command
from clip_moe.evaluation.costs import count_multiply_adds, meta_model, paper_config
from clip_moe.evaluation.embed import write_embeddings
from clip_moe.evaluation.speed import in_turn
from lab.speed.loader import photo
from lab.speed.page import Output, Rounds, cost, machine, page, table
from modeling_clip_moe import CLIPMoEModel

BATCH = 64
# Pictures of 64 x 64 pixels for a model of 64 numbers a token, and photos for one of this architecture
SMALL_PICTURES, PHOTOS, SIZE = 10_000, 128, "ViT-B/32"
SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}


class Pictures(Dataset):
    """Files, prepared by a function of an image."""

    def __init__(self, folder: Path, prepare: Callable[[PIL.Image.Image], torch.Tensor]):
        self.files, self.prepare = sorted(folder.glob("*.jpg")), prepare

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        with PIL.Image.open(self.files[number]) as image:
            return self.prepare(image.convert("RGB"))


def in_a_loop(folder: Path, num_workers: int, open_clip_path: Path | None) -> Callable[[], int]:
    """Embeds the pictures with the dense model of transformers, or with open_clip's of its shape."""
    multiprocessing.set_start_method("fork", force=True)  # a spawned process would spawn its workers
    if open_clip_path is not None:
        sys.path.append(str(open_clip_path))
        module = "torchvision._meta_registrations"  # of compiled operators, which a CPU build of torch has not
        sys.modules[module] = ModuleType(module)
        import open_clip

    def of_transformers() -> tuple[Callable, Callable]:
        model, processor = (kind.from_pretrained(folder / "dense") for kind in (AutoModel, AutoProcessor))
        return (
            lambda image: processor.image_processor(image, return_tensors="pt")["pixel_values"][0],
            lambda batch: model.get_image_features(batch).pooler_output,
        )

    def of_open_clip() -> tuple[Callable, Callable]:
        config = CLIPConfig.from_pretrained(folder / "dense").vision_config
        vision = {"layers": config.num_hidden_layers, "width": config.hidden_size, "patch_size": config.patch_size}
        vision |= {"image_size": config.image_size, "head_width": config.hidden_size // config.num_attention_heads}
        text = {"width": 64, "heads": 1, "layers": 1, "vocab_size": 100, "context_length": 8}
        model = open_clip.CLIP(config.projection_dim, vision, text, quick_gelu=True).eval()
        return open_clip.image_transform(config.image_size, is_train=False), model.encode_image

    def call() -> int:
        prepare, encode = of_transformers() if open_clip_path is None else of_open_clip()
        batches = DataLoader(Pictures(folder / "pictures", prepare), BATCH, num_workers=num_workers)
        with torch.no_grad():
            return len(np.concatenate([F.normalize(encode(batch), dim=-1).numpy() for batch in batches]))

    return call


def ours(folder: Path, num_workers: int, model: str) -> Callable[[], int]:
    multiprocessing.set_start_method("fork", force=True)

    def call() -> int:
        with tempfile.TemporaryDirectory() as output:
            options = {"what": "images", "batch_size": BATCH, "num_workers": num_workers}
            arguments = DataArguments(source=str(folder / "pictures"))
            return write_embeddings(str(folder / model), arguments, Path(output), **options)[0]

    return call


def write_models(folder: Path, size: str) -> float:
    """A dense and a sparse model with random weights, and the sparse one's multiply-adds of an image over the dense."""
    is_small = size == "small"
    edge = 64 if is_small else paper_config(size).vision_config.image_size
    processor = SYMBOLS.build_processor(64, edge)
    text = {"vocab_size": len(processor.tokenizer), "bos_token_id": processor.tokenizer.bos_token_id}
    text |= {"eos_token_id": processor.tokenizer.eos_token_id, "pad_token_id": processor.tokenizer.pad_token_id}
    vision = {"image_size": edge, "patch_size": 16}
    config = CLIPConfig(text_config=SMALL | text, vision_config=SMALL | vision) if is_small else paper_config(size)
    config.text_config.update(text)
    processor.image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge}
    )
    torch.manual_seed(0)
    sparse = sparse_config(config, PRESETS["clip_up"])
    for name, model in (("dense", CLIPModel(config)), ("sparse", CLIPMoEModel(sparse))):
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    counts = [count_multiply_adds(meta_model(of))["image"] for of in (sparse, config)]
    return counts[0] / counts[1]


def cases(folder: Path, open_clip: Path | None) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for num_workers in (0, 2):
        workers = f"{num_workers} workers"
        yield f"transformers' model in a loop, {workers}", partial(cost, in_a_loop, folder, num_workers, None)
        if open_clip is not None:
            yield f"open_clip's model in a loop, {workers}", partial(cost, in_a_loop, folder, num_workers, open_clip)
        yield f"clip-moe embed, {workers}", partial(cost, ours, folder, num_workers, "dense")
    yield "clip-moe embed, 2 workers, CLIP-UP", partial(cost, ours, folder, 2, "sparse")


def small_picture(rng: np.random.Generator) -> bytes:
    """A JPEG of 64 x 64 pixels."""
    file, small = io.BytesIO(), PIL.Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    small.resize((64, 64), PIL.Image.BICUBIC).save(file, "JPEG")
    return file.getvalue()


@command
def embedding(*, output: Output = None, open_clip: Path | None = None, rounds: Rounds = 3) -> str:
    """Pictures a second from files to embeddings, with the time to load the model.

    Args:
        open_clip: a folder that open_clip and torchvision are installed in; default: without it
    """
    rows = []
    for name, number in (("small", SMALL_PICTURES), (SIZE, PHOTOS)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "pictures").mkdir()
            rng = np.random.default_rng(0)
            for index in range(number):
                content = small_picture(rng) if name == "small" else photo(index)
                (folder / "pictures" / f"{index:06d}.jpg").write_bytes(content)
            arithmetic = write_models(folder, name)
            rates = {}
            for case, costs in in_turn(dict(cases(folder, open_clip)), rounds).items():
                assert all(result["result"] == number for result in costs), case
                rates[case] = statistics.median(number / result["seconds"] for result in costs)
        first = rates["transformers' model in a loop, 0 workers"]
        title = f"{number:,} small pictures and a small model" if name == "small" else f"{number:,} photos, {name}"
        rows += [[title, case, f"{rate:,.1f}", f"{rate / first:.2f}"] for case, rate in rates.items()]
        rows[-1][1] += f", {arithmetic:.2f} times the multiply-adds"
    return page(
        output,
        "# From picture files to embeddings",
        table(["", "", "pictures/s", "relative"], rows),
        f"Batches of {BATCH}, medians of {rounds} rounds. {machine()}.",
    )


if __name__ == "__main__":
    embedding.main()
