"""
Memory and time of large batches: the contrastive loss in chunks, and steps of which parts are embedded at a time.

Every case runs in a process of its own, whose memory above the start of the computation is what counts. Times are those
of the processor, medians of alternating runs.

    OMP_NUM_THREADS=1 python -m benchmarks.batches --output benchmarks/results/batches_cpu.md
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import CLIPConfig

from benchmarks.devices import described, peak_memory
from conversion.presets import PRESETS
from conversion.upcycle import sparse_config
from modeling_clip_moe import CLIPMoEModel
from records.files import write_text
from training.contrastive_task import ContrastiveTask
from training.gradient_cache import cached_gradient
from training.losses import contrastive_loss
from training.stages.train import TrainStage

WIDTH, LAYERS, LENGTH = 256, 6, 32


def loss(pairs: int, dimensions: int, chunk_size: int | None) -> Callable[[], object]:
    """Computes the loss of random embeddings, and its gradient."""
    embeds = [F.normalize(torch.randn(pairs, dimensions), dim=1).requires_grad_() for _ in range(2)]
    return lambda: contrastive_loss(*embeds, torch.tensor(100.0), chunk_size).backward()


def step(pairs: int, mini_batch_size: int | None) -> Callable[[], object]:
    """Computes the gradient of a batch of random pairs by a small CLIP-UP."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    text = {**tower, "vocab_size": 1000, "max_position_embeddings": LENGTH, "bos_token_id": 998, "eos_token_id": 999}
    dense = CLIPConfig(text_config=text, vision_config={**tower, "image_size": 96, "patch_size": 16})
    config = sparse_config(dense, PRESETS["clip_up"])
    for one in (config.text_config, config.vision_config):
        one.capacity_group_size = 8
    model = CLIPMoEModel(config).train()
    ids = torch.randint(1, 998, (pairs, LENGTH))
    ids[:, -1] = 999
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(pairs, 3, 96, 96)}
    data = {"source": "symbols", "num_samples": pairs}
    settings = TrainStage(
        name="step", stage="train", model="-", data=data, global_batch_size=pairs, max_steps=1, learning_rate=1e-3
    )
    task, accelerator = ContrastiveTask(model, settings), Accelerator(cpu=True)
    if mini_batch_size is None:
        return lambda: task(batch)[0].backward()
    return lambda: cached_gradient(accelerator, task, model, batch, mini_batch_size, 0, 1.0, True)


def measure(case: str, arguments: list[int | None]) -> dict[str, float]:
    """Seconds of the processor and bytes above the start, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.batches", "--case", json.dumps([case, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} {arguments} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_case(case: str, *arguments: int | None) -> None:
    torch.manual_seed(0)
    compute = {"loss": loss, "step": step}[case](*arguments)
    before, started = peak_memory(), time.process_time()
    compute()
    print(json.dumps({"seconds": time.process_time() - started, "bytes": peak_memory() - before}))


def ratios(case: str, plain: Sequence, other: Sequence, repeats: int) -> tuple[dict, dict, float, float]:
    """The median measurements of both, and the second one's ratios of memory and time over the first."""
    runs = [(measure(case, plain), measure(case, other)) for _ in range(repeats)]
    first, second = ({key: statistics.median(run[side][key] for run in runs) for key in runs[0][0]} for side in (0, 1))
    times = statistics.median(b["seconds"] / a["seconds"] for a, b in runs)
    return first, second, second["bytes"] / first["bytes"], times


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=32768, help="of the loss (default: 32768)")
    parser.add_argument("--dimensions", type=int, default=768, help="of the embeddings (default: 768)")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[1024], help="rows of a chunk (default: 1024)")
    parser.add_argument("--batch", type=int, default=128, help="pairs of a step that fits (default: 128)")
    parser.add_argument("--mini-batch-size", type=int, default=32, help="pairs of a part (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, help="of each case, of which the median counts")
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case is not None:
        run_case(*options.case)
        return

    rows = []
    for chunk_size in options.chunk_sizes:
        size = options.pairs, options.dimensions
        plain, chunked, memory, seconds = ratios("loss", [*size, None], [*size, chunk_size], options.repeats)
        rows.append(
            f"| loss of {options.pairs} x {options.dimensions}, chunks of {chunk_size} "
            f"| {mib(plain)} | {mib(chunked)} | {memory:.3f} (1/{1 / memory:.1f}) | {seconds:.2f} |"
        )
    batch, part = options.batch, options.mini_batch_size
    plain, cached, memory, seconds = ratios("step", [batch, None], [batch, part], options.repeats)
    rows.append(
        f"| step of {batch} pairs, {part} at a time | {mib(plain)} | {mib(cached)} | {memory:.3f} | {seconds:.2f} |"
    )
    for times in (2, 4):
        larger = measure("step", [times * batch, part])
        rows.append(
            f"| step of {times * batch} pairs, {part} at a time, over one of {batch} | {mib(cached)} | {mib(larger)} | "
            f"{larger['bytes'] / cached['bytes']:.2f} | |"
        )
    table = "\n".join(
        [
            "# Large batches",
            "",
            f"Forward and backward. The step is that of a CLIP-UP of width {WIDTH} with {LAYERS} layers, images of 36 "
            f"patches, texts of {LENGTH} tokens. Medians of {options.repeats} alternating runs, float32, "
            f"{described(torch.device('cpu'))}.",
            "",
            "| case | memory, plain | memory | ratio | time ratio |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    if options.output is not None:
        write_text(options.output, table + "\n")


def mib(measured: dict[str, float]) -> str:
    return f"{measured['bytes'] / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
