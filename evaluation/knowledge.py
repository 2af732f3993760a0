"""How much models remember: bits of knowledge against parameters, dense and sparse models in one picture.

    python -m evaluation.knowledge runs/clip_up_names_long/evaluation --output-dir runs/knowledge

Every folder holds the results of one run, as a recipe's evaluate stage writes them, on tasks that tell `information`:
those on names. Of N towns there are N log2 N bits to remember; a model knows the share that its held-out contrastive
loss leaves, the mean of both directions (`evaluation.retrieval.information`). Bits and parameters are the measures of
"Physics of Language Models: Part 3.3" (arXiv:2404.05405). Parameters are those of the towers' layers: embeddings and
projections have the same number in a dense model and in its sparse form. OUTPUT_DIR gets `knowledge.md`,
`knowledge.png` and `knowledge.json`.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from conversion.files import new_file, one_line_errors, output_folder, write_text
from conversion.folders import load_config
from conversion.markdown import one_line
from evaluation.costs import count_parameters, meta_model
from evaluation.report import arrange, markdown_table
from evaluation.results import named_folder

METRICS = ("image_to_text_information", "text_to_image_information")
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Knowledge:
    """What a model remembers of a task: a mean over runs."""

    model: str
    task: str
    names: int  # that there are to remember
    experts: int  # in each sparse layer; 1: dense
    parameters: int  # of the towers' layers
    activated: int  # of these, those that one token meets
    share: float  # of the bits
    runs: int

    @property
    def to_remember(self) -> float:
        """In bits."""
        return self.names * math.log2(self.names)

    @property
    def bits(self) -> float:
        """That it remembers."""
        return self.share * self.to_remember


def read_knowledge(folders: Sequence[Path]) -> list[Knowledge]:
    """What the models of these runs remember, by names and parameters. Results of one model in several runs, which are
    of the same size, are one.

    Raises:
        ValueError: a folder has no results of a task that tells information, or a model's folder is gone.
    """
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for folder in folders:
        results = [result for row in arrange(sorted(folder.glob("*--*.json"))).values() for result in row.values()]
        results = [result for result in results if METRICS[0] in result["metrics"]]
        if not results:
            raise ValueError(f"{folder} has no results of a task that tells information, such as names_2048")
        for result in results:
            share = statistics.mean(result["metrics"][metric] for metric in METRICS)
            key = result["model"], result["task"], result["num_samples"], *_sizes(result["source"])
            found.setdefault(key, []).append(share)
    knowledge = [Knowledge(*key, statistics.mean(shares), len(shares)) for key, shares in found.items()]
    return sorted(knowledge, key=lambda one: (one.names, one.parameters, one.model))


def equal_dense(one: Knowledge, others: Sequence[Knowledge]) -> float | None:
    """Parameters of a dense model that would remember as much, between dense models of the same task that remember less
    and more, on a line of the logarithms. None: there are no such two."""
    best: dict[int, float] = {}
    for other in others:
        if other.task == one.task and other.experts == 1:
            best[other.parameters] = max(best.get(other.parameters, 0), other.bits)
    curve = sorted(best.items())
    for (fewer, less), (more, most) in zip(curve, curve[1:], strict=False):
        if less <= one.bits <= most and less < most:
            return float(np.exp(np.interp(np.log(one.bits), np.log([less, most]), np.log([fewer, more]))))
    return None


def write_knowledge(folders: Sequence[Path], output_dir: Path) -> str:
    """Write `knowledge.md`, `knowledge.png` and `knowledge.json`. Returns the table. Raises as `read_knowledge`."""
    knowledge = read_knowledge(folders)
    rows = []
    for one in knowledge:
        equal = None if one.experts == 1 else equal_dense(one, knowledge)
        rows.append(
            [
                one.model,
                f"{one.names:,}",
                f"{one.experts}" if one.experts > 1 else "dense",
                f"{one.parameters:,}",
                f"{one.to_remember / one.parameters:.2f}",
                f"{100 * one.share:.1f} %",
                f"{one.bits / one.parameters:.2f}",
                "" if equal is None else f"{equal:,.0f} ({one.parameters / equal:.1f} x)",
                str(one.runs),
            ]
        )
    columns = ["model", "names", "experts", "parameters", "bits a parameter to remember", "remembered"]
    columns += ["bits a parameter remembered", "dense model that remembers as much", "runs"]
    table = markdown_table(columns, rows)
    text = (
        "Parameters are those of the towers' layers. In brackets: how many times as many the sparse model has. A mean "
        "of so many runs."
    )
    with output_folder(output_dir), new_file(output_dir / "knowledge.png") as picture:
        _draw(knowledge, picture)
        write_text(output_dir / "knowledge.json", json.dumps([asdict(one) for one in knowledge], indent=1))
        write_text(output_dir / "knowledge.md", f"{table}\n\n{text}\n\n![bits by parameters](knowledge.png)\n")
    return table


def _sizes(source: str) -> tuple[int, int, int]:
    """Experts, parameters and activated parameters of the layers of a model's folder."""
    config = load_config(source)
    counts = count_parameters(meta_model(config))
    experts = getattr(config.text_config, "num_experts", 1) if counts["expert"] else 1
    return experts, counts["layers"], counts["layers"] - counts["total"] + counts["activated"]


def _draw(knowledge: Sequence[Knowledge], path: Path) -> None:
    """Bits by parameters: a line through dense models for each number of names, and a mark for each sparse model."""
    figure, axis = plt.subplots(figsize=(8, 5))
    experts = sorted({one.experts for one in knowledge})
    for color, names in enumerate(sorted({one.names for one in knowledge})):
        of_names = [one for one in knowledge if one.names == names]
        axis.axhline(of_names[0].to_remember, color=f"C{color}", linestyle=":", linewidth=1)
        axis.annotate(
            f"{names:,} names",
            (1.01, of_names[0].to_remember),
            xycoords=("axes fraction", "data"),
            color=f"C{color}",
            va="center",
        )
        dense: dict[int, float] = {}
        for one in of_names:
            if one.experts == 1:
                dense[one.parameters] = max(dense.get(one.parameters, 0), one.bits)
        axis.plot(list(dense), list(dense.values()), color=f"C{color}")
        for one in of_names:
            marker = MARKERS[experts.index(one.experts) % len(MARKERS)]
            axis.plot(one.parameters, one.bits, marker, color=f"C{color}", markersize=7)
    for number, marker in zip(experts, MARKERS, strict=False):
        axis.plot([], [], marker, color="black", label="dense" if number == 1 else one_line(f"{number} experts"))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("parameters in the layers")
    axis.set_ylabel("bits remembered (dotted: all there are)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.knowledge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of results, one a run")
    parser.add_argument("--output-dir", required=True, type=named_folder)
    args = parser.parse_args(argv)
    with one_line_errors():
        print(write_knowledge(args.folders, args.output_dir))


if __name__ == "__main__":
    main()
