"""The page and the pictures of `evaluation.experts`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.page_folder import write_page
from evaluation.preferences import Caption, RoutedImages
from evaluation.report import markdown_table
from evaluation.routing_pictures import (
    POOLED_TOKEN,
    draw_agreement,
    draw_captions,
    draw_coactivation,
    draw_dropped,
    draw_expert,
    draw_expert_patches,
    draw_gates,
    draw_patches,
    draw_shares,
    draw_words,
)
from records.result_schema import ExpertSummary

# tower ("text", "vision") -> layer, from 0 -> ...
ByLayer = dict[str, dict[int, Any]]


@dataclass(frozen=True)
class Routing:
    """What routers and fusion gates did with all tokens of the tasks, and with those that reach the output. All by
    tower and layer; see `evaluation.routing.RouterCounts`.

    Args:
        shares, output_shares: the share of the tokens that each expert computed.
        share_entropy, output_share_entropy: of these, in bits.
        entropy, output_entropy: the mean entropy of a token's distribution, in bits.
        coactivation: the share of the tokens that two experts both computed.
        dropped: the share of the choices that capacity dropped.
        overflowing: the share that the capacity of training would have dropped, where there is one.
        gates, output_gates: the mean share of the base FFN, where there are fusion gates.
        scales: the mean weight of a token's experts together, where that is not always 1.
    """

    shares: ByLayer
    output_shares: ByLayer
    share_entropy: ByLayer
    output_share_entropy: ByLayer
    entropy: ByLayer
    output_entropy: ByLayer
    coactivation: ByLayer
    dropped: ByLayer
    overflowing: ByLayer
    gates: ByLayer
    output_gates: ByLayer
    scales: ByLayer


@dataclass(frozen=True)
class Findings:
    """All that the page shows.

    Args:
        beginning: of the page: `summary_section`, and the scores of each expert.
        title: of the picture of shares.
        agreement: "images" or "texts" -> column -> column -> linear CKA.
        layers: tower -> the layer whose patches or words are drawn.
        capacity_groups: tower -> how many images or texts share the capacity of training.
        num_embeddings: "images" or "texts" -> how many of them the agreement is of.
        routed_images: what that layer does with some images, where the vision tower is sparse.
        dropped: capacity factor -> what `evaluation.preferences.dropped_patches` gives of the first of these images, as
            many as share a capacity; empty where there is no factor.
        words, captions: of each expert, what `evaluation.preferences.top_words` and `top_captions` give, where the text
            tower is sparse; no captions where the tokenizer does not say which characters a token is.
        expert: the one that has a picture of its own, if one does.
    """

    beginning: str
    title: str
    routing: Routing
    agreement: Mapping[str, Mapping[str, Mapping[str, float | None]]]
    layers: Mapping[str, int]
    capacity_groups: Mapping[str, int]
    num_embeddings: Mapping[str, int]
    routed_images: RoutedImages | None
    dropped: Mapping[float, np.ndarray]
    words: list[list[tuple[str, float, int]]] | None
    captions: list[list[Caption]] | None
    expert: int | None


def summary_section(summary: ExpertSummary) -> str:
    """Whether the experts do anything, with how to read it."""
    table = markdown_table(["measured", "found"], summary.rows)
    return "\n\n".join(["## Do the experts do anything?", ExpertSummary.READING, table])


def write_findings(
    output_dir: Path, findings: Findings, result: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """All files, or none of them. `result`, `settings`: see `evaluation.page_folder.write_page`."""
    routing, images, words, expert = findings.routing, findings.routed_images, findings.words, findings.expert
    captions, text_layer = findings.captions, findings.layers.get("text")
    pictures = {
        "routing.png": lambda path: draw_shares(routing.shares, routing.output_shares, path, findings.title),
        "agreement.png": lambda path: draw_agreement(findings.agreement, path),
        "coactivation.png": lambda path: draw_coactivation(routing.coactivation, path),
        "gates.png": lambda path: draw_gates(routing.gates, routing.output_gates, path),
        "patches.png": lambda path: draw_patches(images, path),
        "expert_patches.png": lambda path: draw_expert_patches(images, path),
        "dropped.png": lambda path: draw_dropped(images, findings.dropped, path),
        "expert_words.png": lambda path: draw_words(words, text_layer, path),
        "expert_captions.png": lambda path: draw_captions(captions, text_layer, path),
        "expert.png": lambda path: draw_expert(
            expert, images, None if captions is None else (text_layer, captions[expert]), path
        ),
    }
    lacks = {
        "coactivation.png": not _has_pairs(routing),
        "gates.png": not routing.gates,
        "patches.png": images is None,
        "expert_patches.png": images is None,
        "dropped.png": not findings.dropped,
        "expert_words.png": words is None,
        "expert_captions.png": captions is None,
        "expert.png": expert is None,
    }
    pictures |= {name: None for name, lacking in lacks.items() if lacking}
    write_page(output_dir, "experts", _page(findings), result, settings, pictures)


def _has_pairs(routing: Routing) -> bool:
    """Whether some token has two experts."""
    layers = (matrix for of in routing.coactivation.values() for matrix in of.values())
    return any(value for matrix in layers for row, line in enumerate(matrix) for value in line[:row])


def _page(findings: Findings) -> str:
    routing = findings.routing
    sections = ["# Experts", findings.beginning, *_agreement(findings), *_shares(routing), *_capacity(findings)]
    if _has_pairs(routing):
        sections += ["Which experts compute the same tokens:", "![co-activation](coactivation.png)"]
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
    if findings.expert is not None:
        sections += [f"## Expert {findings.expert}", f"![what expert {findings.expert} computes](expert.png)"]
    if findings.routed_images is not None:
        sections += ["## Patches", "![patches](patches.png)", "![patches of each expert](expert_patches.png)"]
        sections += _dropped(findings)
    if findings.words is not None:
        rows = [
            [str(expert), ", ".join(f"{word} ({share:.0%} of {count})" for word, share, count in words)]
            for expert, words in enumerate(findings.words)
        ]
        header = ["expert", f"computes in layer {findings.layers['text']} of the text tower most"]
        sections += ["## Words", "![words of each expert](expert_words.png)", markdown_table(header, rows)]
    if findings.captions is not None:
        sections.append("![captions with what each expert computes](expert_captions.png)")
    return "\n\n".join(sections)


def _agreement(findings: Findings) -> list[str]:
    """Tables of CKA, experts alone with each other and with the routed model."""
    sections = ["## Agreement", "Linear CKA of what experts alone make of the same images and texts, 1 for alike:"]
    for what, of in findings.agreement.items():
        rows = [
            [column, *("" if value is None else f"{value:.3f}" for value in row.values())] for column, row in of.items()
        ]
        sections.append(markdown_table([f"{findings.num_embeddings[what]} {what}", *of], rows))
    return [*sections, "![agreement](agreement.png)"]


def _shares(routing: Routing) -> list[str]:
    rows = [
        [
            *(tower, str(layer), tokens),
            *(f"{share:.1%}" for share in shares[tower][layer]),
            *(f"{share_entropy[tower][layer]:.2f}", f"{entropy[tower][layer]:.2f}"),
        ]
        for tower, of in routing.shares.items()
        for layer in of
        for tokens, shares, share_entropy, entropy in (
            ("all", routing.shares, routing.share_entropy, routing.entropy),
            (POOLED_TOKEN[tower], routing.output_shares, routing.output_share_entropy, routing.output_entropy),
        )
    ]
    num_experts = len(rows[0]) - 5
    experts = [f"computed by expert {number}" for number in range(num_experts)]
    header = ["tower", "layer", "tokens", *experts, "entropy of the shares", "entropy of a token's distribution"]
    note = (
        f"Entropies are in bits: {math.log2(num_experts):.2f} where all experts have the same share, 0 where one has "
        "all. That of a token's distribution says how sure the router is of a token."
    )
    return ["## Shares", markdown_table(header, rows), note, "![routing](routing.png)"]


def _capacity(findings: Findings) -> list[str]:
    """What was dropped, and what would be in training."""
    routing, groups = findings.routing, findings.capacity_groups
    rows = [
        [tower, str(layer), f"{dropped:.1%}", *(["", ""] if value is None else [f"{value:.1%}", str(groups[tower])])]
        for tower, of in routing.dropped.items()
        for layer, dropped in of.items()
        for value in [routing.overflowing.get(tower, {}).get(layer)]
    ]
    if not any(dropped for of in routing.dropped.values() for dropped in of.values()) and not routing.overflowing:
        return []
    header = ["tower", "layer", "choices dropped", "with the capacity of training", "images or texts that share it"]
    return [markdown_table(header, rows)]


def _dropped(findings: Findings) -> list[str]:
    """The patches that capacity drops."""
    if not findings.dropped:
        return [
            "The patches that capacity would drop are not drawn: the vision tower has no capacity factor. "
            "`python -m evaluation.experts --capacity-factors` takes some."
        ]
    note = (
        "Patches that no expert computes, because all experts that the router chose for them are full. Who comes first "
        "has room first, so that the last images of a batch lose most. The layers below are as at inference."
    )
    rows = [[f"{factor:g}", f"{dropped.mean():.1%}"] for factor, dropped in findings.dropped.items()]
    header = ["capacity factor", f"patches dropped in layer {findings.layers['vision']}"]
    return [note, markdown_table(header, rows), "![dropped patches](dropped.png)"]
