"""What each expert of a sparse model knows, and which tokens it gets.

    python -m evaluation.experts --model runs/demo/clip_moe --tasks symbols_pairs --output-dir experts

Every task is measured with all tokens sent through one expert, for every expert, and with the routers (CLIP-MoE Table
1, CLIP-FMoE Tables 4 and 17), also with other numbers of experts a token (CLIP-FMoE Tables 18 and 19). An expert alone
has the weight that the experts of a token have together in the routed model. OUTPUT_DIR gets `experts.json`, the table
`experts.md`, the share of tokens per expert and layer, `routing.png` (CLIP-MoE Figure 3), and of a model with fusion
gates how much of the base FFN each layer keeps, `gates.png`; both over all tokens, and at the tokens that reach the
output, which are class tokens and end tokens. Where the weights do not sum to 1, `experts.json` also has the scales
that `python -m conversion.dense --scale` takes.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from conversion.files import new_file, one_line_errors, output_folder, write_text
from conversion.provenance import environment, weights_fingerprint
from evaluation.embedder import Embedder, usable_device
from evaluation.measures import measure
from evaluation.report import markdown_table
from evaluation.results import named_folder
from evaluation.routing import (
    POOLED_TOKEN,
    GateMean,
    RouterCounts,
    average_gates,
    chosen_experts,
    count_tokens,
    draw_gates,
    draw_shares,
)
from evaluation.tasks import TASKS, Task, find_tasks, loaded_once, parse_tasks
from modeling_clip_moe import CLIPMoEModel

ROUTED, EXPERT = "routed", "expert"
EXPERT_PROTOCOL = (
    "An expert alone has the weight that the experts of a token have together in the routed model: for each token and "
    "layer, the sum of the weights that the router gives, which is 1 where they are normalized."
)


# Name of a task or of a column of the table -> ...
ByTask = dict[str, dict[str, float]]
ByColumn = dict[str, ByTask]
# tower ("text", "vision") -> layer, from 0 -> ...
ByLayer = dict[str, dict[int, Any]]


@dataclass(frozen=True)
class Routing:
    """What routers and fusion gates did with all tokens of the tasks, and with those that reach the output.

    Args:
        shares, output_shares: tower -> layer -> the share of the tokens that each expert computed.
        gates, output_gates: tower -> layer -> the mean share of the base FFN, where there are fusion gates.
        scales: tower -> layer -> the mean weight of a token's experts together, where that is not always 1.
    """

    shares: ByLayer
    output_shares: ByLayer
    gates: ByLayer
    output_gates: ByLayer
    scales: ByLayer


def analyze_experts(
    model: str | Path,
    tasks: Mapping[str, Task],
    output_dir: str | Path,
    *,
    num_experts_per_tok: Sequence[int] = (),
    batch_size: int = 64,
    device: str | torch.device | None = None,
) -> str:
    """Measure every expert alone and the routed model, and count where the routers send the tokens of all tasks.

    Args:
        model: a folder or hub name of a `CLIPMoEModel`.
        tasks: name -> task; see `evaluation.tasks.find_tasks`.
        num_experts_per_tok: numbers of experts a token to try, beside the model's own.

    Returns:
        The table: a row a metric, a column an expert, in percent; the best of a row is bold. Below it, how an expert is
        measured, and in how many metrics the routed model is better than all of them.

    Raises:
        ValueError: a model without sparse layers or whose towers differ in their number of experts, or whose sparse
            text tower sees no text of the tasks; else as `evaluation.embedder.Embedder`.
    """
    set_seed(0)
    tasks, output_dir = loaded_once(tasks), Path(output_dir)
    embedder = Embedder(model, None, batch_size, usable_device(device))
    num_experts = _num_experts(embedder.model, model)
    _require_texts(tasks, embedder.model)
    for number in num_experts_per_tok:
        with chosen_experts(embedder.model, number):
            pass  # an impossible number is an error before the work
    metrics = _measure_alone(tasks, embedder, num_experts) | _measure_numbers(tasks, embedder, num_experts_per_tok)
    metrics[ROUTED], routing = _measure_routed(tasks, embedder)
    table = f"{_table(metrics)}\n\n{EXPERT_PROTOCOL} {_verdict(metrics)}"
    result = {
        "source": str(model),
        "weights": weights_fingerprint(str(model)),
        "protocols": {name: task.protocol for name, task in tasks.items()},
        "expert_protocol": EXPERT_PROTOCOL,
        "metrics": {task: {column: by_task[task] for column, by_task in metrics.items()} for task in tasks},
        **dataclasses.asdict(routing),
        **environment(),
    }
    _write(output_dir, table, routing, result, title=f"% of the tokens computed by each expert: {', '.join(tasks)}")
    return table


def _measure_all(tasks: Mapping[str, Task], embedder: Embedder) -> ByTask:
    return {name: measure(task, embedder)["metrics"] for name, task in tasks.items()}


def _measure_alone(tasks: Mapping[str, Task], embedder: Embedder, num_experts: int) -> ByColumn:
    """The metrics of each expert, which gets all tokens."""
    metrics = {}
    for expert in range(num_experts):
        with embedder.model.force_expert(expert):
            metrics[f"{EXPERT} {expert}"] = _measure_all(tasks, embedder)
    return metrics


def _measure_numbers(tasks: Mapping[str, Task], embedder: Embedder, num_experts_per_tok: Sequence[int]) -> ByColumn:
    """The metrics with other numbers of experts a token."""
    metrics = {}
    for number in num_experts_per_tok:
        with chosen_experts(embedder.model, number):
            metrics[f"K = {number}"] = _measure_all(tasks, embedder)
    return metrics


def _measure_routed(tasks: Mapping[str, Task], embedder: Embedder) -> tuple[ByTask, Routing]:
    """The metrics of the model as it is, and what its routers and fusion gates did meanwhile."""
    model = embedder.model
    with (
        count_tokens(model) as counts,
        count_tokens(model, at_output=True) as output_counts,
        average_gates(model) as gates,
        average_gates(model, at_output=True) as output_gates,
    ):
        metrics = _measure_all(tasks, embedder)
    unnormalized = {
        tower: layers for tower, layers in counts.items() if not getattr(model.config, f"{tower}_config").norm_topk_prob
    }
    routing = Routing(
        shares=_by_layer(counts, lambda counter: counter.shares().tolist()),
        output_shares=_by_layer(output_counts, lambda counter: counter.shares().tolist()),
        gates=_by_layer(gates, GateMean.mean),
        output_gates=_by_layer(output_gates, GateMean.mean),
        scales=_by_layer(unnormalized, RouterCounts.mean_weight),
    )
    return metrics, routing


def _write(output_dir: Path, table: str, routing: Routing, result: dict[str, Any], title: str) -> None:
    """All files, or none of them."""
    with output_folder(output_dir), ExitStack() as files:
        picture = files.enter_context(new_file(output_dir / "routing.png"))
        draw_shares(routing.shares, routing.output_shares, picture, title)
        if routing.gates:
            picture = files.enter_context(new_file(output_dir / "gates.png"))
            draw_gates(routing.gates, routing.output_gates, picture)
        page = files.enter_context(new_file(output_dir / "experts.md"))
        page.write_text(_page(table, routing), encoding="utf-8")
        write_text(output_dir / "experts.json", json.dumps(result, indent=2))


def _page(table: str, routing: Routing) -> str:
    rows = [
        [tower, str(layer), tokens, *(f"{share:.1%}" for share in shares)]
        for tower, of in routing.shares.items()
        for layer in of
        for tokens, shares in (("all", of[layer]), (POOLED_TOKEN[tower], routing.output_shares[tower][layer]))
    ]
    experts = [f"computed by expert {number}" for number in range(len(rows[0]) - 3)]
    shares = markdown_table(["tower", "layer", "tokens", *experts], rows)
    sections = ["# Experts", table, shares, "![routing](routing.png)"]
    if routing.scales:
        rows = [
            [tower, str(layer), f"{scale:.3f}"] for tower, of in routing.scales.items() for layer, scale in of.items()
        ]
        sections += [
            markdown_table(["tower", "layer", "mean weight of the experts of a token together"], rows),
            "`python -m conversion.dense --scale experts.json` multiplies an expert's last layer by it.",
        ]
    if routing.gates:
        rows = [
            [tower, str(layer), f"{gate:.1%}", f"{routing.output_gates[tower][layer]:.1%}"]
            for tower, of in routing.gates.items()
            for layer, gate in of.items()
        ]
        header = ["tower", "layer", "mean fusion gate: share of the base FFN", "at the class or end token"]
        sections += [markdown_table(header, rows), "![fusion gates](gates.png)"]
    return "\n\n".join(sections) + "\n"


def _by_layer(counts: ByLayer, value: Callable[[Any], Any]) -> ByLayer:
    return {tower: {layer: value(counter) for layer, counter in of.items()} for tower, of in counts.items()}


def _num_experts(model: torch.nn.Module, source: str | Path) -> int:
    if not isinstance(model, CLIPMoEModel):
        raise ValueError(f"{source} is a dense CLIP: it has no experts")
    towers = [config for config in (model.config.text_config, model.config.vision_config) if config.moe_layers]
    numbers = sorted({config.num_experts for config in towers})
    if len(numbers) != 1:
        raise ValueError(f"{source} has towers with {numbers or 'no'} experts: all sparse towers need as many")
    return numbers[0]


def _require_texts(tasks: Mapping[str, Task], model: CLIPMoEModel) -> None:
    if model.config.text_config.moe_layers and all(task.kind == "linear_probe" for task in tasks.values()):
        raise ValueError(
            f"{', '.join(tasks)}: no text of these tasks reaches the sparse text tower; add one with texts, such as "
            "retrieval"
        )


def _table(metrics: ByColumn) -> str:
    rows = []
    for task, of_routed in metrics[ROUTED].items():
        for metric in of_routed:
            values = [by_task[task][metric] for by_task in metrics.values()]
            cells = [f"**{value:.1%}**" if value == max(values) else f"{value:.1%}" for value in values]
            rows.append([f"{task}: {metric}", *cells])
    return markdown_table(["metric", *metrics], rows)


def _verdict(metrics: ByColumn) -> str:
    """Whether routing is worth it."""
    experts = [by_task for column, by_task in metrics.items() if column.startswith(EXPERT)]
    better = [
        value > max(by_task[task][metric] for by_task in experts)
        for task, of_routed in metrics[ROUTED].items()
        for metric, value in of_routed.items()
    ]
    return f"The routed model is better than every expert alone in {sum(better)} of {len(better)} metrics."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.experts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub name of a CLIPMoEModel")
    parser.add_argument("--tasks", required=True, help=", ".join(TASKS))
    parser.add_argument("--output-dir", required=True, type=named_folder)
    parser.add_argument(
        "--num-experts-per-tok", type=int, nargs="+", default=[], metavar="K", help="other numbers of experts a token"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", help="default: the accelerator, if there is one")
    args = parser.parse_args(argv)
    with one_line_errors():
        table = analyze_experts(
            args.model,
            find_tasks(parse_tasks(args.tasks)),
            args.output_dir,
            num_experts_per_tok=args.num_experts_per_tok,
            batch_size=args.batch_size,
            device=args.device,
        )
    print(table)


if __name__ == "__main__":
    main()
