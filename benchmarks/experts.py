"""
Time of one sparse FFN layer over K dense FFNs on the same tokens, for each experts implementation.

    OMP_NUM_THREADS=1 python -m benchmarks.experts --implementations by_device eager grouped_mm --repeats 3 \\
        --output benchmarks/results/experts_cpu.md
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers.models.clip.modeling_clip import CLIPMLP

from benchmarks.devices import described
from modeling_clip_moe import CLIPMoEVisionConfig
from modeling_clip_moe.modeling_clip_moe import CLIPMoEExperts
from records.files import write_text

SIZES = {
    "b16": {"hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 16},
    "l14": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
# forward and backward, of which only the input has a gradient, or also the weights
MODES = ("forward", "frozen", "trained")


def measure(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: of the clock on a GPU, of the processor on a CPU, where other programs would disturb."""
    if device.type == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    function()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def run(modules: list[torch.nn.Module], arguments: list[torch.Tensor], backward: bool):
    """Sum of the modules' outputs, and with `backward` the gradient of everything."""
    with torch.set_grad_enabled(backward):
        output = sum(module(*arguments) for module in modules)
        if backward:
            output.float().square().mean().backward()
    for module in modules:
        module.zero_grad()


def ratios(
    size: str,
    images: int,
    num_experts: int,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 5,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    dropped: float = 0.0,
    modes: Sequence[str] = MODES,
) -> dict[tuple[str, str], float]:
    """(implementation, mode) -> time over K dense FFNs on the same tokens, medians of alternating runs: `repeats` of a
    training step, five times as many of a forward.

    Args:
        dropped: the share of the choices that capacity drops.
    """
    device = torch.device(device)
    config = CLIPMoEVisionConfig(**SIZES[size], num_experts=num_experts, num_experts_per_tok=top_k)
    num_tokens = images * ((config.image_size // config.patch_size) ** 2 + 1)
    torch.manual_seed(0)
    hidden_states = torch.randn(num_tokens, config.hidden_size, device=device, dtype=dtype)
    weights, ids = torch.rand(num_tokens, num_experts, device=device).softmax(dim=-1).topk(top_k)
    ids = ids.where(torch.rand_like(weights) >= dropped, num_experts)
    experts = CLIPMoEExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    dense = [CLIPMLP(config).to(device, dtype) for _ in range(top_k)]

    def call(name: str, mode: str) -> float:
        inputs = hidden_states.clone().requires_grad_(mode != "forward")
        if name == "dense":
            return measure(lambda: run(dense, [inputs], mode != "forward"), device)
        config._experts_implementation = name
        return measure(lambda: run([experts], [inputs, ids, weights], mode != "forward"), device)

    found = {}
    for mode in modes:
        for module in (experts, *dense):
            module.train(mode != "forward").requires_grad_(mode != "frozen")
        times = {name: [] for name in ("dense", *implementations)}
        for repeat in range((5 * repeats if mode == "forward" else repeats) + 1):  # a forward is short
            for name in times:
                seconds = call(name, mode)
                if repeat > 0:  # the first round warms up
                    times[name].append(seconds)
        for name in implementations:
            pairs = zip(times[name], times["dense"], strict=True)
            found[name, mode] = statistics.median(sparse / dense_time for sparse, dense_time in pairs)
    return found


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the table, of which each takes seconds to minutes."""
    device, top_k = torch.device(options.device), options.num_experts_per_tok
    settings = itertools.product(options.sizes, options.dtypes, options.images, options.num_experts)
    for size, dtype_name, images, num_experts in settings:
        config, dtype = CLIPMoEVisionConfig(**SIZES[size]), getattr(torch, dtype_name)
        # batched_mm copies the weights of an expert for every choice
        num_tokens = images * ((config.image_size // config.patch_size) ** 2 + 1)
        copies = num_tokens * top_k * config.hidden_size * config.intermediate_size * dtype.itemsize / 2**30
        names = [name for name in options.implementations if name != "batched_mm" or copies <= options.max_copies]
        found = ratios(size, images, num_experts, top_k, dtype, device, options.repeats, names)
        title = [f"{size.upper()[0]}/{size[1:]}", dtype_name, str(images), str(num_experts)]
        for name in options.implementations:
            figures = [f"{found[name, mode]:.2f}" for mode in MODES] if name in names else ["", "", ""]
            yield [*title, name if name in names else f"{name}: would copy {copies:.0f} GiB of weights", *figures]


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="model sizes")
    parser.add_argument("--images", nargs="+", type=int, default=[1, 8], help="images in the batch (default: 1 8)")
    parser.add_argument("--num-experts", nargs="+", type=int, default=[4, 8], help="E (default: 4 8)")
    parser.add_argument("--num-experts-per-tok", type=int, default=2, help="K (default: 2)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1 ..."
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32"], help="of all tensors"
    )
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="timed runs of each, of which the median counts; five times as many of a forward",
    )
    parser.add_argument(
        "--max-copies", type=float, default=4, help="skip batched_mm where it copies more GiB of weights (default: 4)"
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args(argv)
    if min(*options.images, options.repeats) < 1:
        parser.error("--images and --repeats must be at least 1")

    try:
        header = ["layer", "dtype", "images", "experts", "implementation", *MODES]
        lines = [header, ["---"] * len(header), *rows(options)]
        table = "\n".join(
            [
                "# Experts implementations",
                "",
                f"Time of a sparse FFN over {options.num_experts_per_tok} dense FFNs on the same tokens (1.00: no "
                f"overhead), medians of {options.repeats} alternating runs, five times as many of a "
                f"forward: the forward; forward and backward with frozen weights, as where routers "
                f"train; and all. {described(torch.device(options.device))}.",
                "",
                *(f"| {' | '.join(line)} |" for line in lines),
            ]
        )
        print(table)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.output, table + "\n")
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
