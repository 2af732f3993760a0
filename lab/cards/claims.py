"""The claims of the papers' abstracts, each with what was measured and whether it holds.

    python -m lab.cards.claims model_cards/claims.yaml --output model_cards/claims.md

The page has them as a table and as a picture beside it, `claims.png`. `lab.cards.verdicts` says what the file of
claims holds.
"""

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.lines import Line2D

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.intervals import LEVEL
from clip_moe.engine.markdown import escape
from clip_moe.engine.messages import one_line
from clip_moe.evaluation.figures import plot_text, plt, save
from clip_moe.evaluation.page import write_page
from lab.cards.verdicts import (
    DOES_NOT_HOLD,
    HOLDS,
    INCONCLUSIVE,
    VERDICTS,
    Claim,
    Measured,
    deciding,
    measure_claim,
    read_claims,
    verdict_of_all,
)

INTRODUCTION = f"""\
These claims are the results that the papers' abstracts name, whether they hold here or not; where one is a gain over a
dense model, that claim or another asks for the gain over a dense model that cost as much, too. Of trials that differ in
size alone, the largest stands for them. `seeds.md` of each card has all scores.

Differences are percent points, means of the seeds, with their {LEVEL:.0%} intervals, of the score that decides. Samples
are pairs of an image and its captions, from where the models part unless said otherwise.
"""
JUDGED = f"""\
Made by `python -m lab.cards.claims` from `seeds.json` of the cards, which `python -m lab.cards.seeds` writes from
runs of the recipe of the same name with several seeds. Figures are percentages, means of the seeds, and of each
difference its paired {LEVEL:.0%} interval over the seeds (Student's t), widened so that all intervals of a claim are
right together (Bonferroni). "{HOLDS}": the whole interval is above 0. "{DOES_NOT_HOLD}": the whole interval is below 0.
"{INCONCLUSIVE}": it has 0 in it. Of several models that the first one has to beat, it has to beat each; the figures
are those of the hardest one. Where a claim is about several scores, the verdict is the worst of theirs; of those with
it, the one with the least difference decides. Where it names a number of points, these are subtracted from the
differences first.

Where two models are equal, at most one claim in twenty gets another verdict than "{INCONCLUSIVE}" by chance. Three
seeds are few: with them, a difference has to be several times its deviation. The intervals cover what a seed changes.
In the symbol world, that is the order of batches and, where a recipe trains its own CLIP, the first weights; the CLIPs
of this repository, the training pictures of these runs and the test are the same for all seeds. In the world of names,
it is the first weights, the training and test pictures and their order.
"""
# Verdict -> color and marker: told apart without colors, too
MARKS = {HOLDS: ("#0a6b2d", "o"), DOES_NOT_HOLD: ("#b3261e", "X"), INCONCLUSIVE: ("#666666", "D")}


@dataclass(frozen=True)
class Judged:
    """A claim with its number on the page, the name of its paper as markdown, what was measured, and the verdict."""

    number: int
    paper: str
    claim: Claim
    measured: Sequence[Measured]
    verdict: str


@command
def write_claims(claims: Path, /, output: Folder) -> str:
    """Write the page of all claims, and their picture beside it.

    Args:
        claims: YAML file of claims.
        output: the page to write.

    Returns:
        How many claims hold.
    """
    judged = []
    for title, paper in read_claims(claims).items():
        name = f"[{escape(title)}]({paper.link})" if paper.link else escape(title)
        for claim in paper.claims:
            measured = measure_claim(claim, claims.parent)
            verdict = verdict_of_all(score.verdict for score in measured)
            judged.append(Judged(len(judged) + 1, name, claim, measured, verdict))
    counts = Counter(judgement.verdict for judgement in judged)
    counted = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    picture = output.with_suffix(".png").name
    shown = f"The differences of the claims in the table above, with their intervals and a line at 0. {counted}."
    page = [
        "# Claims of the papers",
        INTRODUCTION.strip(),
        _claim_table(judged, claims.parent, output.parent),
        f"![{shown}]({picture})",
        "## What was compared",
        _figure_table(judged),
        _notes(judged),
        "## How claims are judged",
        JUDGED.strip(),
    ]
    pictures = {picture: lambda file: draw_claims(judged, file)}
    write_page(output.with_suffix(""), "\n\n".join(filter(None, page)), pictures)
    return counted


def _claim_table(judged: Sequence[Judged], base: Path, output_folder: Path) -> str:
    rows = []
    for judgement in judged:
        claim, difference = judgement.claim, f"missing: {escape(judgement.claim.missing)}"
        if judgement.measured:
            decides = deciding(judgement.measured)
            difference = escape(f"{decides.task} {decides.metric}: {_difference(decides)}")
        pages = {card: "frontier.md" if (base / card / "frontier.md").is_file() else "seeds.md" for card in claim.cards}
        paths = [(card, Path(os.path.relpath(base / card / page, output_folder))) for card, page in pages.items()]
        links = ", ".join(f"[{escape(card)}]({path.as_posix()})" for card, path in paths)
        cells = [judgement.paper, escape(claim.claim), escape(claim.budget), difference, judgement.verdict, links]
        rows.append([f"{judgement.number}", *cells])
    return _table(["", "paper", "claim", "trained with", "difference", "verdict", "all scores"], rows)


def _figure_table(judged: Sequence[Judged]) -> str:
    """Where the paper has it, which models are compared, and all figures."""
    rows = []
    for judgement in judged:
        claim, models = judgement.claim, ""
        if judgement.measured:
            points = f", by at least {claim.by:g} points" if claim.by > 0 else f", at most {-claim.by:g} points worse"
            models = escape(f"{claim.better} against {' / '.join(claim.than)}{points * bool(claim.by)}")
        figures = "<br>".join(escape(_figures(measured)) for measured in judgement.measured)
        rows.append([f"{judgement.number}", escape(claim.place), models, figures])
    return _table(["", "in the paper", "models", "figures"], rows)


def _notes(judged: Sequence[Judged]) -> str:
    return "\n".join(f"- {item.number}: {one_line(item.claim.note)}" for item in judged if item.claim.note)


def draw_claims(judged: Sequence[Judged], path: Path) -> None:
    """A row for each claim, with the difference of the score that decides and its interval. Close to 0 the axis is
    linear, beyond 1 point logarithmic."""
    figure, axis = plt.subplots(figsize=(8.5, 1.3 + 0.33 * len(judged)), layout="constrained")
    axis.axvline(0, color="black", linewidth=1)
    axis.set_xscale("symlog", linthresh=1)
    for row, judgement in enumerate(judged):
        if not judgement.measured:
            axis.text(0, row, f" {judgement.verdict} ", fontsize=9, va="center", ha="center", backgroundcolor="white")
            continue
        decides, (color, marker) = deciding(judgement.measured), MARKS[judgement.verdict]
        axis.plot(decides.interval, [row, row], color=color, linewidth=2)
        axis.plot(decides.difference, row, color=color, marker=marker, markersize=8)
        if judgement.claim.by:
            axis.plot([judgement.claim.by] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1, linestyle=":")
    labels = [f"{plot_text(judgement.claim.short, 60)}  {judgement.number}" for judgement in judged]
    axis.set_yticks(range(len(judged)), labels, fontsize=9)
    axis.set_ylim(len(judged) - 0.5, -0.5)
    ticks = [-50, -10, -3, -1, 0, 1, 3, 10, 50]
    axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=9)
    axis.set_xticks([], minor=True)
    axis.set_xlabel(f"percent points, with the {LEVEL:.0%} interval (logarithmic beyond 1)", fontsize=9)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    legend = [
        Line2D([], [], color=color, marker=marker, markersize=8, linewidth=2, label=verdict)
        for verdict, (color, marker) in MARKS.items()
    ]
    legend.append(Line2D([], [], color="black", linestyle=":", linewidth=1, label="points that the claim names"))
    figure.legend(handles=legend, loc="outside upper center", ncol=len(legend), frameon=False, fontsize=9)
    save(figure, path)


def _figures(measured: Measured) -> str:
    better, than = map(statistics.mean, (measured.better, measured.than))
    scores = f"{better:.1f} against {than:.1f} of {measured.rival}"
    return f"{measured.task} {measured.metric}: {scores}: {_difference(measured)}, {measured.verdict}"


def _difference(measured: Measured) -> str:
    low, high = measured.interval
    return f"{measured.difference:+.1f} ({low:+.1f} to {high:+.1f})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


if __name__ == "__main__":
    write_claims.main()
