"""The page of `evaluation.experts`, from what stands in `experts.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from clip_moe.engine.markdown import markdown_table
from clip_moe.engine.result_schema import ExpertSummary
from clip_moe.evaluation.expert_summary import EXPERT, MEAN, ROUTED

ALT_TEXTS = {
    "routing.png": "share of the tokens that each expert computes",
    "patches.png": "the expert of each patch of some images",
    "expert_patches.png": "the patches that each expert is surest to get",
}


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


def page_of(result: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The whole page.

    Args:
        result: what `experts.json` holds.
        pictures: that are drawn.
    """

    def shown(*names: str) -> list[str]:
        return [f"![{ALT_TEXTS[name]}]({name})" for name in names if name in pictures]

    sections = ["# Experts", page_beginning(result), "## Agreement", _agreement(result)]
    sections += ["## Routing", *shown("routing.png"), *_layers(result)]
    if result["scales"]:
        sections.append("`clip-moe dense --scale` with this folder multiplies an expert's last layer by its weight.")
    if result["words"]:
        sections.append(f"## Words, layer {result['layers']['text']} of the text tower")
        rows = [
            [
                f"{expert}",
                f"{of['chance']:.0%}",
                ", ".join(f"{word} ({share:.0%} of {n})" for word, share, n in of["words"]),
            ]
            for expert, of in enumerate(result["words"])
        ]
        sections.append(markdown_table(["expert", "of all words", "more often than by chance"], rows))
    if "patches.png" in pictures:
        sections += [f"## Patches, layer {result['layers']['vision']} of the vision tower"]
        sections += shown("patches.png", "expert_patches.png")
    return "\n\n".join(sections)


def _agreement(result: Mapping[str, Any]) -> str:
    """A table of the linear CKA of every two experts alone and the routed model, for images and for texts."""
    counts = " and ".join(f"{number} {kind}" for kind, number in result["num_embeddings"].items())
    tables = [
        markdown_table([kind, *rows], [[name, *map(_cka, row.values())] for name, row in rows.items()])
        for kind, rows in result["agreement"].items()
    ]
    return "\n\n".join([f"Linear CKA of the embeddings of {counts}, 1 for alike:", *tables])


def _cka(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


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
