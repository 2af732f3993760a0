"""The claims of papers, each with what was measured and whether it holds.

    python -m model_cards.claims model_cards/claims.yaml --output model_cards/claims.md

The page begins with the headlines as a table and as a picture beside it, `claims.png`; all claims follow by paper.
`model_cards.verdicts` says what the file of claims and the folders of results hold. Claims of folders that are not all
there yet are "not measured".
"""

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.lines import Line2D

from evaluation.figures import plot_text, plt, save
from evaluation.page import write_page
from evaluation.report import computed_with
from model_cards.verdicts import (
    DOES_NOT_HOLD,
    HOLDS,
    INCONCLUSIVE,
    NOT_MEASURED,
    SHOWN_ELSEWHERE,
    VERDICTS,
    Claim,
    Measured,
    Paper,
    Scores,
    deciding,
    measure_claim,
    read_all_scores,
    read_claims,
    verdict_of_all,
)
from records.command_line import Folder, command
from records.files import read_json
from records.intervals import LEVEL
from records.markdown import escape, markdown_table, one_line

HEADLINES = f"""\
These claims are the results that the papers' abstracts name, whether they hold here or not; where one is a gain over a
dense model, that claim or another asks for the gain over a dense model that cost as much, too. Of trials that differ in
size alone, the largest stands for them. The [appendix](#appendix-all-claims) has all claims with all figures; numbers
are those of the appendix.

Differences are percent points, means of the seeds, with their {LEVEL:.0%} intervals, of the score that decides. Samples
are pairs of an image and its captions, from where the models part.
"""
INTRODUCTION = f"""\
Made by `python -m model_cards.claims`. Figures are percentages, means of the seeds, and of each difference its paired
{LEVEL:.0%} interval over the seeds (Student's t), widened so that all intervals of a claim are right together
(Bonferroni). "{HOLDS}": the whole interval is above 0. "{DOES_NOT_HOLD}": the whole interval is below 0.
"{INCONCLUSIVE}": it has 0 in it. Of several models that the first one has to beat, it has to beat each; the figures
are those of the hardest one. Where a claim is about several scores, the verdict is the worst of theirs; of those with
it, the one with the least difference decides. Where it names a number of points, these are subtracted from the
differences first.

Of two equal models, one claim in twenty has another verdict than "{INCONCLUSIVE}" by chance, or fewer: of a hundred
claims, about three. Three seeds are few: with them, a difference has to be several times its deviation. The intervals
cover what a seed changes. In the symbol world, these are the order of batches and, where a recipe trains its own CLIP,
the first weights; the CLIPs that lie in this repository, the training pictures of these runs and the test are the same
for all seeds, but for what is learned against what is kept, where each seed has its own. In the world of names, these
are the first weights, the training pictures, their order and, but with 2,048 names, the test pictures.
"""
# Verdict -> color and marker: told apart without colors, too
MARKS = {HOLDS: ("#0a6b2d", "o"), DOES_NOT_HOLD: ("#b3261e", "X"), INCONCLUSIVE: ("#666666", "D")}


@dataclass(frozen=True)
class Judged:
    """A claim with its number on the page, what was measured of it, the verdict, and the folder of its first model."""

    number: int
    claim: Claim
    measured: Sequence[Measured]
    verdict: str
    folder: Path | None


@command
def write_claims(claims: Path, output: Folder) -> str:
    """Write the page of all claims and, where there are headlines, their picture beside it.

    Args:
        claims: YAML file of claims.
        output: the page to write.

    Returns:
        The table of how many claims hold, a row a paper.
    """
    sections, counts, all_judged = [], [], []
    for title, paper in read_claims(claims).items():
        folders = [claims.parent / results for results in paper.results]
        try:
            scores, origin = read_all_scores(folders)
            where = " and ".join(map(str, folders))
            judged = [
                _judge(number, claim, scores, origin, where, claims.parent)
                for number, claim in enumerate(paper.claims, len(all_judged) + 1)
            ]
            sections.append(_section(title, paper, judged, scores, claims.parent, output.parent))
        except ValueError as error:
            raise ValueError(f"{claims}: {title}: {error}") from error
        counts.append(
            [title, *(str(sum(judgement.verdict == verdict for judgement in judged)) for verdict in VERDICTS)]
        )
        all_judged += judged
    summary = markdown_table(["paper", *VERDICTS], counts)
    page = [
        "# Claims of the papers",
        "## How claims are judged",
        INTRODUCTION.strip(),
        "## Appendix: all claims",
        summary,
        *sections,
    ]
    headlines = [judgement for judgement in all_judged if judgement.claim.headline]
    pictures = {}
    if headlines:
        name = output.with_suffix(".png").name
        pictures[name] = lambda file: draw_headlines(headlines, file)
        table = _headline_table(headlines, output.parent)
        page[1:1] = [HEADLINES.strip(), table, f"![{_alt_text(headlines)}]({name})"]
    write_page(output.with_suffix(""), "\n\n".join(page), pictures)
    return summary


def _judge(
    number: int, claim: Claim, scores: Scores, origin: Mapping[tuple[str, str], Path], where: str, base: Path
) -> Judged:
    if claim.shown_in is not None and (base / claim.shown_in).exists():
        return Judged(number, claim, (), SHOWN_ELSEWHERE, None)
    if claim.better is None or not scores:
        return Judged(number, claim, (), NOT_MEASURED, None)
    measured = measure_claim(claim, scores, where)
    folder = origin[claim.better, deciding(measured).task]
    return Judged(number, claim, measured, verdict_of_all(judgement.verdict for judgement in measured), folder)


def _headline_table(headlines: Sequence[Judged], output_folder: Path) -> str:
    rows = []
    for judgement in headlines:
        difference, link = "", ""
        if judgement.measured:
            decides = deciding(judgement.measured)
            difference = escape(f"{decides.task} {decides.metric}: {_difference(decides)}")
            link = f"[{escape(judgement.folder.name)}]({_link(judgement.folder / 'seeds.md', output_folder)})"
        elif judgement.claim.missing:
            difference = f"missing: {escape(judgement.claim.missing)}"
        claim, budget = escape(judgement.claim.claim), escape(judgement.claim.headline.budget or "")
        rows.append([f"{judgement.number}", claim, budget, difference, judgement.verdict, link])
    return _table(["", "claim", "trained with", "difference", "verdict", "all scores"], rows)


def _alt_text(headlines: Sequence[Judged]) -> str:
    counts = Counter(judgement.verdict for judgement in headlines)
    verdicts = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    return f"The differences of the headlines in the table above, with their intervals and a line at 0. {verdicts}."


def draw_headlines(headlines: Sequence[Judged], path: Path) -> None:
    """A row for each headline, with the difference of the score that decides and its interval. Close to 0 the axis is
    linear, beyond 1 point logarithmic."""
    figure, axis = plt.subplots(figsize=(8.5, 1.3 + 0.33 * len(headlines)), layout="constrained")
    axis.axvline(0, color="black", linewidth=1)
    axis.set_xscale("symlog", linthresh=1)
    for row, judgement in enumerate(headlines):
        if not judgement.measured:
            axis.text(0, row, f" {judgement.verdict} ", fontsize=9, va="center", ha="center", backgroundcolor="white")
            continue
        decides, (color, marker) = deciding(judgement.measured), MARKS[judgement.verdict]
        axis.plot(decides.interval, [row, row], color=color, linewidth=2)
        axis.plot(decides.difference, row, color=color, marker=marker, markersize=8)
        if judgement.claim.by:
            axis.plot([judgement.claim.by] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1, linestyle=":")
    labels = [f"{plot_text(judgement.claim.headline.short, 60)}  {judgement.number}" for judgement in headlines]
    axis.set_yticks(range(len(headlines)), labels, fontsize=9)
    axis.set_ylim(len(headlines) - 0.5, -0.5)
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


def _section(
    title: str, paper: Paper, judged: Sequence[Judged], scores: Scores, base: Path, output_folder: Path
) -> str:
    """The part of the page on one paper."""
    rows, notes = [], []
    for judgement in judged:
        claim, figures = judgement.claim, "<br>".join(escape(_figures(measured)) for measured in judgement.measured)
        compared = _compared(claim, base, output_folder)
        rows.append(
            [f"{judgement.number}", escape(claim.claim), escape(claim.place), compared, figures, judgement.verdict]
        )
        note = one_line(claim.note) or "nothing was tried yet to find the cause" * (judgement.verdict == DOES_NOT_HOLD)
        notes += [f"- {judgement.number}: {note}"] * bool(note)
    made = "There are no results yet."
    if scores:
        num_seeds = len(next(of_seeds for row in scores.values() for of_seeds in row.values()))
        links = [
            f"[{escape(name)}]({_link(base / name, output_folder)}). {_computed_with(base / name)}"
            for name in paper.results
        ]
        made = f"Results of {num_seeds} seeds: {' '.join(links)}"
    table = _table(["", "claim", "in the paper", "what would show it", "figures", "verdict"], rows)
    name = f"[{escape(title)}]({paper.link})" if paper.link else escape(title)
    parts = [f"### {name}", f"{made} Made by", f"```bash\n{paper.command.strip()}\n```", table]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _compared(claim: Claim, base: Path, output_folder: Path) -> str:
    """The comparison that would show a claim, as a cell of a table."""
    if claim.missing is not None:
        return f"missing: {escape(claim.missing)}"
    if claim.shown_in is not None:
        shown_in = base / claim.shown_in
        name = escape(shown_in.name)
        return f"[{name}]({_link(shown_in, output_folder)})" if shown_in.exists() else name
    points = f", by at least {claim.by:g} points" if claim.by > 0 else f", at most {-claim.by:g} points worse"
    on = [f"{task} ({', '.join(metrics)})" for task, metrics in claim.scores.items()]
    return escape(f"{claim.better} against {' / '.join(claim.than)}{points * bool(claim.by)}; on {', '.join(on)}")


def _figures(measured: Measured) -> str:
    better, than = map(statistics.mean, (measured.better, measured.than))
    scores = f"{better:.1f} against {than:.1f} of {measured.rival}"
    return f"{measured.task} {measured.metric}: {scores}: {_difference(measured)}, {measured.verdict}"


def _difference(measured: Measured) -> str:
    low, high = measured.interval
    return f"{measured.difference:+.1f} ({low:+.1f} to {high:+.1f})"


def _computed_with(folder: Path) -> str:
    """The line with commit and versions that `model_cards.seeds` wrote, and those of single experts."""
    path = folder / "seeds.md"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("Commit ")]
    if not (folder / "experts_0.json").exists():
        return lines[-1]
    made = dict.fromkeys(computed_with(read_json(path)) for path in sorted(folder.glob("experts_*.json")))
    return f"{lines[-1]} Single experts: {escape('; '.join(made))}."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


if __name__ == "__main__":
    write_claims.main()
