"""What each expert of a sparse model knows, and which tokens it gets.

    python -m evaluation.experts --model runs/clip_moe_glyphs/clip_moe --tasks glyphs_pairs --output-dir experts

Every task is measured with all tokens sent through one expert, for every expert, and with the routers (CLIP-MoE Table
1, CLIP-FMoE Tables 4 and 17), also with other numbers of experts a token (CLIP-FMoE Tables 18 and 19). An expert alone
has the weight that the experts of a token have together in the routed model. OUTPUT_DIR gets `experts.json`, the table
`experts.md`, the share of tokens per expert and layer, `routing.png` (CLIP-MoE Figure 3), and of a model with fusion
gates how much of the base FFN each layer keeps, `gates.png`; both over all tokens, and at the tokens that reach the
output, which are class tokens and end tokens. Where the weights do not sum to 1, `experts.json` also has the scales
that `python -m conversion.dense --scale` takes.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from conversion.files import new_file, one_line_errors, output_folder, write_text
from conversion.provenance import environment, weights_fingerprint
from evaluation.datasets import BENCHMARKS, Benchmark, kept
from evaluation.evaluate import Embedder, measure, parse_tasks, require_known, usable_device
from evaluation.report import markdown_table
from evaluation.results import named_folder
from evaluation.routing import (
    GateMean,
    RouterCounts,
    average_gates,
    chosen_experts,
    count_tokens,
    draw_gates,
    draw_shares,
)
from modeling_clip_moe import CLIPMoEModel

ROUTED, EXPERT = "routed", "expert"
EXPERT_PROTOCOL = (
    "An expert alone has the weight that the experts of a token have together in the routed model: for each token and "
    "layer, the sum of the weights that the router gives, which is 1 where they are normalized."
)


def analyze_experts(
    model: str | Path,
    tasks: Sequence[str],
    output_dir: str | Path,
    *,
    num_experts_per_tok: Sequence[int] = (),
    batch_size: int = 64,
    device: str | torch.device | None = None,
    benchmarks: dict[str, Benchmark] | None = None,
) -> str:
    """Measure every expert alone and the routed model, and count where the routers send the tokens of all tasks.

    Args:
        model: a folder or hub name of a `CLIPMoEModel`.
        tasks: keys of `benchmarks` (default: those of `evaluation.datasets`).
        num_experts_per_tok: numbers of experts a token to try, beside the model's own.

    Returns:
        The table: a row a metric, a column an expert, in percent; the best of a row is bold. Below it, how an expert is
        measured, and in how many metrics the routed model is better than all of them.

    Raises:
        ValueError: an unknown task, a model without sparse layers or whose towers differ in their number of experts, or
            whose sparse text tower sees no text of the tasks; else as `evaluation.evaluate.Embedder`.
    """
    benchmarks = kept(BENCHMARKS if benchmarks is None else benchmarks)
    require_known(tasks, benchmarks)
    set_seed(0)
    output_dir = Path(output_dir)
    embedder = Embedder(model, None, batch_size, usable_device(device))
    num_experts = _num_experts(embedder.model, model)
    if embedder.model.config.text_config.moe_layers and all(benchmarks[t].kind == "linear_probe" for t in tasks):
        raise ValueError(
            f"{', '.join(tasks)}: no text of these tasks reaches the sparse text tower; add one with texts, such as "
            "retrieval"
        )
    for number in num_experts_per_tok:
        with chosen_experts(embedder.model, number):
            pass  # an impossible number is an error before the work
    metrics: dict[str, dict[str, dict[str, float]]] = {task: {} for task in tasks}
    for expert in range(num_experts):
        with embedder.model.force_expert(expert):
            for task in tasks:
                metrics[task][f"{EXPERT} {expert}"] = measure(benchmarks[task], embedder)["metrics"]
    for number in num_experts_per_tok:
        with chosen_experts(embedder.model, number):
            for task in tasks:
                metrics[task][f"K = {number}"] = measure(benchmarks[task], embedder)["metrics"]
    sparse = embedder.model
    with (
        count_tokens(sparse) as counts,
        count_tokens(sparse, at_output=True) as output_counts,
        average_gates(sparse) as gates,
        average_gates(sparse, at_output=True) as output_gates,
    ):
        for task in tasks:
            metrics[task][ROUTED] = measure(benchmarks[task], embedder)["metrics"]
    shares, output_shares = (_by_layer(of, lambda counter: counter.shares().tolist()) for of in (counts, output_counts))
    gates, output_gates = (_by_layer(of, GateMean.mean) for of in (gates, output_gates))
    unnormalized = {
        tower: layers
        for tower, layers in counts.items()
        if not getattr(sparse.config, f"{tower}_config").norm_topk_prob
    }
    scales = _by_layer(unnormalized, RouterCounts.mean_weight)
    result = {
        "source": str(model),
        "weights": weights_fingerprint(str(model)),
        "protocols": {task: benchmarks[task].protocol for task in tasks},
        "expert_protocol": EXPERT_PROTOCOL,
        "metrics": metrics,
        "shares": shares,
        "output_shares": output_shares,
        "gates": gates,
        "output_gates": output_gates,
        "scales": scales,
        **environment(),
    }
    table = f"{_table(metrics)}\n\n{EXPERT_PROTOCOL} {_verdict(metrics)}"
    text = f"# Experts\n\n{table}\n\n![routing](routing.png)\n"
    if scales:
        rows = [[tower, str(layer), f"{scale:.3f}"] for tower, of in scales.items() for layer, scale in of.items()]
        text += f"\n{markdown_table(['tower', 'layer', 'mean weight of the experts of a token together'], rows)}\n"
        text += "\n`python -m conversion.dense --scale experts.json` multiplies an expert's last layer by it.\n"
    if gates:
        rows = [
            [tower, str(layer), f"{gate:.1%}", f"{output_gates[tower][layer]:.1%}"]
            for tower, of in gates.items()
            for layer, gate in of.items()
        ]
        header = ["tower", "layer", "mean fusion gate: share of the base FFN", "at the class or end token"]
        text += f"\n{markdown_table(header, rows)}\n\n![fusion gates](gates.png)\n"
    with output_folder(output_dir), ExitStack() as files:  # all of them or none
        title = f"% of the tokens computed by each expert: {', '.join(tasks)}"
        draw_shares(shares, output_shares, files.enter_context(new_file(output_dir / "routing.png")), title)
        if gates:
            draw_gates(gates, output_gates, files.enter_context(new_file(output_dir / "gates.png")))
        page = files.enter_context(new_file(output_dir / "experts.md"))
        page.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        write_text(output_dir / "experts.json", json.dumps(result, indent=2))
    return table


def _by_layer(counts: dict[str, dict[int, Any]], value: Callable[[Any], Any]) -> dict[str, dict[int, Any]]:
    return {tower: {layer: value(counter) for layer, counter in of.items()} for tower, of in counts.items()}


def _num_experts(model: torch.nn.Module, source: str | Path) -> int:
    if not isinstance(model, CLIPMoEModel):
        raise ValueError(f"{source} is a dense CLIP: it has no experts")
    towers = [config for config in (model.config.text_config, model.config.vision_config) if config.moe_layers]
    numbers = sorted({config.num_experts for config in towers})
    if len(numbers) != 1:
        raise ValueError(f"{source} has towers with {numbers or 'no'} experts: all sparse towers need as many")
    return numbers[0]


def _table(metrics: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = []
    columns = list(next(iter(metrics.values())))
    for task, of_model in metrics.items():
        for metric in of_model[ROUTED]:
            values = [of_model[column][metric] for column in columns]
            cells = [f"**{value:.1%}**" if value == max(values) else f"{value:.1%}" for value in values]
            rows.append([f"{task}: {metric}", *cells])
    return markdown_table(["metric", *columns], rows)


def _verdict(metrics: dict[str, dict[str, dict[str, float]]]) -> str:
    """Whether routing is worth it."""
    better = [
        value > max(values[metric] for column, values in of_model.items() if column.startswith(EXPERT))
        for of_model in metrics.values()
        for metric, value in of_model[ROUTED].items()
    ]
    return f"The routed model is better than every expert alone in {sum(better)} of {len(better)} metrics."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.experts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub name of a CLIPMoEModel")
    parser.add_argument("--tasks", required=True, help=", ".join(BENCHMARKS))
    parser.add_argument("--output-dir", required=True, type=named_folder)
    parser.add_argument(
        "--num-experts-per-tok", type=int, nargs="+", default=[], metavar="K", help="other numbers of experts a token"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", help="default: the accelerator, if there is one")
    args = parser.parse_args(argv)
    with one_line_errors():
        tasks = parse_tasks(args.tasks)
        table = analyze_experts(
            args.model,
            tasks,
            args.output_dir,
            num_experts_per_tok=args.num_experts_per_tok,
            batch_size=args.batch_size,
            device=args.device,
        )
    print(table)


if __name__ == "__main__":
    main()
