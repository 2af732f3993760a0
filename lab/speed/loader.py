"""Images a second of the loader that trains, beside Pillow's decode and resize in a loop on one core.

OMP_NUM_THREADS=1 python -m lab.speed.loader --output lab/speed/results/loader_cpu.md
"""

import io
import itertools
import json
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image
from transformers import CLIPProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from clip_moe.data.arguments import Augmentation, DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.command_line import command
from clip_moe.evaluation.speed import in_turn
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share
from lab.speed.page import Output, Rounds, machine, page, table

BATCH, SHARDS, EDGE = 32, 4, 224
LOOP = "Pillow's decode and resize in a loop"
CROPS = Augmentation(random_resized_crop=[0.9, 1.0])


def photo(seed: int) -> bytes:
    """A JPEG with soft and fine structures, of about 90 kB as photos of this size have."""
    rng = np.random.default_rng(seed)
    small = PIL.Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    image = np.asarray(small.resize((640, 480), PIL.Image.BICUBIC)) + rng.normal(0, 12, (480, 640, 3))
    file = io.BytesIO()
    PIL.Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def write_images(folder: Path, number: int) -> None:
    """A folder of images with metadata, and shards of the same pairs."""
    (folder / "images").mkdir()
    (folder / "shards").mkdir()
    lines = []
    with (folder / "images" / "metadata.jsonl").open("w") as metadata:
        for index in range(number):
            content, name = photo(index), f"{index:05d}"
            (folder / "images" / f"{name}.jpg").write_bytes(content)
            lines.append({"file_name": f"{name}.jpg", "caption": f"picture number {index}"})
            with tarfile.open(folder / "shards" / f"{index % SHARDS}.tar", "a") as shard:
                for suffix, part in (("jpg", content), ("txt", lines[-1]["caption"].encode())):
                    member = tarfile.TarInfo(f"{name}.{suffix}")
                    member.size = len(part)
                    shard.addfile(member, io.BytesIO(part))
        metadata.writelines(json.dumps(line) + "\n" for line in lines)


def pillow_loop(folder: Path, number: int) -> float:
    """Images a second of decoding and resizing, and nothing else."""
    paths, started = sorted((folder / "images").glob("*.jpg"))[:number], time.perf_counter()
    for path in paths:
        with PIL.Image.open(path) as image:
            image.convert("RGB").resize((EDGE * 640 // 480, EDGE), PIL.Image.BICUBIC)
    return number / (time.perf_counter() - started)


def rate(loader: PairLoader, number: int) -> float:
    """Images a second of `number` images, after what is read ahead."""
    batches = loader.batches(0)
    ahead = 1 + 2 * loader.arguments.num_workers  # torch reads two batches a worker ahead
    for batch in itertools.islice(batches, ahead):
        assert batch["pixel_values"].shape == (BATCH, 3, EDGE, EDGE)
    started = time.perf_counter()
    for _ in range(number // BATCH):
        next(batches)
    return number // BATCH * BATCH / (time.perf_counter() - started)


def ways(folder: Path, processor: CLIPProcessor) -> Iterator[tuple[str, PairLoader]]:
    """Names of ways to read images, and their loaders."""
    images = {"source": str(folder / "images")}
    shards = {"source": str(folder / "shards"), "image_column": "jpg", "caption_column": "txt"}
    sources = [
        ("loaded", images, None),
        ("loaded, random crops of [0.9, 1]", images, CROPS),
        ("streamed from a folder", images | {"streaming": True}, None),
        (f"streamed from {SHARDS} shards", shards | {"streaming": True}, None),
        (f"indexed in {SHARDS} shards", shards | {"indexed": True}, None),
    ]
    for num_workers, (name, source, augmentation) in itertools.product((0, 2), sources):
        arguments = DataArguments(**source, num_workers=num_workers)
        loader = PairLoader(load_pairs(arguments), processor, arguments, Share(BATCH), augmentation=augmentation)
        yield f"{name}, {num_workers} workers", loader


def medians(images: int, rounds: int, wanted: Collection[str] | None = None) -> dict[str, float]:
    """Images a second of the loop (`LOOP`) and of the wanted ways; by default of all."""
    images_of_edge = CLIPImageProcessorPil(size={"shortest_edge": EDGE})
    processor = CLIPProcessor(image_processor=images_of_edge, tokenizer=SYMBOLS.build_tokenizer(EDGE))
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), images)
        calls = {LOOP: partial(pillow_loop, Path(folder), images)}
        for name, loader in ways(Path(folder), processor):
            if wanted is None or name in wanted:
                # Workers give two batches at once: of few, chance would decide how many fall into the time
                calls[name] = partial(rate, loader, images * (1 + loader.arguments.num_workers))
        return {name: statistics.median(rates) for name, rates in in_turn(calls, rounds).items()}


@command
def compare_loaders(*, output: Output = None, images: int = 320, rounds: Rounds = 5) -> str:
    """Images a second of the loader that trains, beside Pillow's decode and resize in a loop on one core.

    The images are JPEGs of 640 x 480 pixels, made on the spot, for a model of 224. Loaded pairs are read from a folder
    with metadata; streams from a folder and from four webdataset shards, which are also read by their index. Every way
    is measured once in each round; the medians count. Batches are of 32 pairs, and the first of every way are not
    timed: workers start while they are made. With W workers, 1 + W times as many images are read as by the loop.
    """
    rates = medians(images, rounds)
    return page(
        output,
        f"# Reading {images} JPEGs of 640 x 480 pixels for a model of {EDGE}",
        table(
            ["", "images/s", "relative"],
            [[name, f"{rate:,.0f}", f"{rate / rates[LOOP]:.2f}"] for name, rate in rates.items()],
        ),
        f"Medians of {rounds} rounds. {machine()}, {os.cpu_count()} cores, Pillow {PIL.__version__}.",
    )


if __name__ == "__main__":
    compare_loaders.main()
