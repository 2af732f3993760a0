"""Whether the experts of a sparse model do anything, in three measures; and the page of `clip_moe.evaluation.experts`,
made from `experts.json`."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from clip_moe.engine.intervals import score_difference_reach
from clip_moe.engine.markdown import markdown_table
from clip_moe.engine.result_schema import Collapse, ExpertSummary, Spread
from clip_moe.evaluation.report import primary_columns
from clip_moe.evaluation.task import Task

# Columns of the table; an expert's number follows
ROUTED, EXPERT, MEAN = "routed", "expert", "mean of experts"
# Tower -> the inputs it embeds
EMBEDDED = {"text": "texts", "vision": "images"}


def linear_cka(first: np.ndarray, second: np.ndarray) -> float | None:
    """Linear centered kernel alignment (Kornblith et al., 2019, https://arxiv.org/abs/1905.00414, section 3) of two
    embeddings (rows, D) and (rows, D') of the same rows: 1 if they are equal up to rotation and scale, 0 if they have
    nothing to do with each other. None where one of them is the same for all rows."""
    first, second = (np.asarray(x, np.float64) - np.mean(x, axis=0, dtype=np.float64) for x in (first, second))
    scale = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    return float(np.linalg.norm(first.T @ second) ** 2 / scale) if scale > 0 else None


def agreement(embeds: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """name -> name -> `linear_cka` of the embeddings (rows, D) of every two."""
    return {name: {other: linear_cka(embeds[name], embeds[other]) for other in embeds} for name in embeds}


def summarize(
    tasks: Mapping[str, Task],
    routed: Mapping[str, dict[str, Any]],
    mean: Mapping[str, dict[str, Any]],
    routing: Mapping[str, Mapping[int, Mapping[str, Any]]],
    agreement: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    num_experts: int,
) -> ExpertSummary:
    """The collapse test, the entropy of the routers and how alike the experts are.

    Args:
        tasks: by their names.
        routed, mean: task -> result of `clip_moe.evaluation.measures.measure` for the model, and for the model with the
            mean of each layer's experts.
        routing: tower -> sparse layer -> means, with the `entropy` in bits.
        agreement: "images" or "texts" -> "expert N" -> "expert N" -> linear CKA; other columns do not count.
        num_experts: those that a router has to choose from.
    """
    rows = {name: {"title": task.title, "primary": task.primary} for name, task in tasks.items()}
    collapse = []
    for (task, metric), title in primary_columns(rows).items():
        scores = [results[task]["metrics"][metric] for results in (routed, mean)]
        reach = score_difference_reach(routed[task], mean[task], metric)
        error = None if reach is None else max(reach)
        collapse.append(Collapse(title=title, routed=scores[0], mean=scores[1], error=error))
    matrices = [agreement[EMBEDDED[tower]] for tower in routing]  # a dense tower makes the same for all experts
    experts = [column for column in matrices[0] if column.startswith(EXPERT)]
    pairs = [matrix[first][other] for matrix in matrices for first, other in itertools.combinations(experts, 2)]
    values = [value for value in pairs if value is not None]
    return ExpertSummary(
        collapse=collapse,
        entropy=Spread.of(means["entropy"] for layers in routing.values() for means in layers.values()),
        most_entropy=math.log2(num_experts),
        agreement=Spread.of(values) if values else None,
    )


def page_beginning(result: Mapping[str, Any]) -> str:
    """Whether the experts do anything, with how to read it, and the scores of each expert, the best in bold."""
    summary = ExpertSummary(**result["summary"])
    rows, better = [], []
    for task, by_column in result["metrics"].items():
        columns = [column for column in by_column if column != MEAN]
        for metric in by_column[columns[0]]:
            values = {column: by_column[column][metric] for column in columns}
            highest = max(values.values())
            cells = [f"**{value:.1%}**" if value == highest else f"{value:.1%}" for value in values.values()]
            rows.append([f"{task}: {metric}", *cells])
            better.append(values[ROUTED] > max(v for column, v in values.items() if column.startswith(EXPERT)))
    verdict = f"The routed model is better than every expert alone in {sum(better)} of {len(better)} metrics."
    sections = ["## Do the experts do anything?", ExpertSummary.READING]
    sections += [markdown_table(["measured", "found"], summary.rows), "## Every expert alone"]
    sections += [markdown_table(["metric", *columns], rows), f"{result['expert_protocol']} {verdict}"]
    return "\n\n".join(sections)


def page_of(result: Mapping[str, Any]) -> str:
    """The whole page, by what `experts.json` holds."""
    sections = ["# Experts", page_beginning(result), "## Routing"]
    sections += ["![share of the tokens that each expert computes](routing.png)", *_layers(result)]
    if result["scales"]:
        sections.append("`clip-moe dense --scale` with this folder multiplies an expert's last layer by its weight.")
    if result["layer"] is not None:
        sections.append(f"## Patches, layer {result['layer']} of the vision tower")
        sections.append("![the expert of each patch of some images](patches.png)")
    return "\n\n".join(sections)


def _layers(result: Mapping[str, Any]) -> list[str]:
    """A table with a row for each layer, without the columns that say nothing."""
    rows = []
    for tower, layers in result["routing"].items():
        for layer, means in layers.items():
            row = {"tower": tower, "layer": str(layer)}
            row["entropy of the shares"] = f"{means['share_entropy']:.2f}"
            row["entropy of a token's distribution"] = f"{means['entropy']:.2f}"
            row["choices dropped"] = f"{means['dropped']:.1%}" * (means["dropped"] > 0)
            row["weight of a token's experts"] = f"{means['weight']:.3f}" * (tower in result["scales"])
            row["fusion gate: share of the base FFN"] = "" if means["gate"] is None else f"{means['gate']:.1%}"
            rows.append(row)
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    note = (
        f"Entropies are in bits: {result['summary']['most_entropy']:.2f} where all experts have the same share, 0 "
        "where one has all. That of a token's distribution says how sure the router is of a token."
    )
    return [markdown_table(columns, [[row[column] for column in columns] for row in rows]), note]
