"""How much models remember: bits of knowledge against parameters, dense and sparse models in one picture.

    python -m lab.cards.knowledge runs/clip_up_names_sizes/evaluation --output_dir runs/knowledge

Every folder holds the results of one run, as a recipe's evaluate stage writes them, on tasks that tell `information`:
those on names and icons. To tell N of them apart takes log2 N bits for each; a model knows the share that its held-out
contrastive loss leaves, the mean of both directions (`evaluation.retrieval.information`). 3 bits of a town's name are
its country, which a picture tells without memory of the town: they do not count. Bits and parameters are the
measures of "Physics of Language Models: Part 3.3" (arXiv:2404.05405). Parameters are those of the towers' layers:
embeddings and projections have the same number in a dense model and in its sparse form. OUTPUT_DIR gets `knowledge.md`,
`knowledge.png` and `knowledge.json`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from clip_moe.conversion.checkpoints import clip_class, config_of
from clip_moe.data.names import COUNTRIES
from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.markdown import markdown_table
from clip_moe.engine.provenance import trainings
from clip_moe.evaluation.costs import count_parameters, meta_model
from clip_moe.evaluation.figures import plot_text, plt, save
from clip_moe.evaluation.page import write_page
from clip_moe.evaluation.report import SAME_FOR_TASK, arrange, differ
from clip_moe.evaluation.task import INFORMATION
from lab.cards.seeds import without_seed

# Bits of each that need no memory: of a town its country, which the tint and the name's ending tell
TOLD = {"names": math.log2(len(COUNTRIES))}
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Knowledge:
    """The knowledge of a model on a task: a mean over runs."""

    model: str
    task: str
    names: int  # that there are to remember
    experts: int  # in each sparse layer; 0: dense
    parameters: int  # of the towers' layers
    activated: int  # of these, those that one token meets
    share: float  # of log2 names bits, see `evaluation.retrieval.information`
    runs: int

    @property
    def to_remember(self) -> float:
        """In bits."""
        return self.names * (math.log2(self.names) - self.told)

    @property
    def bits(self) -> float:
        """That it remembers."""
        return self.names * max(0.0, self.share * math.log2(self.names) - self.told)

    @property
    def told(self) -> float:
        return TOLD.get(self.task.partition("_")[0], 0)


def read_knowledge(folders: Sequence[Path]) -> list[Knowledge]:
    """What the models of these runs remember, by names and parameters. Results of one model in several runs, which are
    of the same size, are one. Those of models whose training did not leave chance, or collapsed, are left out."""
    runs: dict[tuple, list[dict]] = {}
    for folder in folders:
        files = sorted(folder.glob("*--*.json"))
        results = [result for row in arrange(files).values() for result in row.values()] if files else []
        results = [result for result in results if set(INFORMATION) <= result["metrics"].keys()]
        if not results:
            raise ValueError(f"{folder} has no results of a task that tells information, such as names_2048")
        for result in results:
            if any(end.is_dead for end in trainings(Path(result["source"])).values()):
                continue
            key = result["model"], result["task"], result["num_samples"], *_sizes(result["source"])
            for other in runs.setdefault(key, []):
                if "weights" in result and result["weights"] == other.get("weights"):
                    what = f"{result['task']} of {result['model']!r}"
                    raise ValueError(f"{folder} has {what} with the weights of another run")
                for name in SAME_FOR_TASK:
                    if differ(without_seed(result), without_seed(other), name):
                        what = f"{result['task']} of {result['model']!r}"
                        raise ValueError(f"{what}: {name} in {folder} is another one than before")
            runs[key].append(result)
    knowledge = []
    for key, results in runs.items():
        shares = [statistics.mean(result["metrics"][metric] for metric in INFORMATION) for result in results]
        knowledge.append(Knowledge(*key, statistics.mean(shares), len(shares)))
    return sorted(knowledge, key=lambda entry: (entry.names, entry.task, entry.parameters, entry.model))


def best_dense(knowledge: Sequence[Knowledge], task: str) -> list[tuple[int, float]]:
    """Parameters and bits of the dense models that remember more of a task than every smaller one, by size."""
    best: list[tuple[int, float]] = []
    for entry in sorted(knowledge, key=lambda entry: (entry.parameters, -entry.bits)):
        if entry.task == task and not entry.experts and entry.bits > max((bits for _, bits in best), default=0):
            best.append((entry.parameters, entry.bits))
    return best


def equal_dense(entry: Knowledge, others: Sequence[Knowledge]) -> float | None:
    """Parameters of a dense model that would remember as much, between dense models of the same task that remember less
    and more, on a line of the logarithms. None: there are no such two."""
    curve = best_dense(others, entry.task)
    for (fewer, less), (more, most) in zip(curve, curve[1:], strict=False):
        if less <= entry.bits <= most:
            return float(np.exp(np.interp(np.log(entry.bits), np.log([less, most]), np.log([fewer, more]))))
    return None


@command
def write_knowledge(folders: Sequence[Path], /, output_dir: Folder) -> str:
    """Write `knowledge.md`, `knowledge.png` and `knowledge.json`. Returns the table.

    Args:
        folders: one with the results of each run.
    """
    knowledge = read_knowledge(folders)
    rows = []
    for entry in knowledge:
        equal = equal_dense(entry, knowledge) if entry.experts else None
        row = {"model": entry.model, "task": entry.task, "experts": str(entry.experts or "dense")}
        row["parameters"] = f"{entry.parameters:,}"
        row["bits a parameter to remember"] = f"{entry.to_remember / entry.parameters:.2f}"
        row["remembered"] = f"{100 * entry.bits / entry.to_remember:.1f} %"
        row["bits a parameter remembered"] = f"{entry.bits / entry.parameters:.2f}"
        of_dense = "" if equal is None else f"{equal:,.0f} ({entry.parameters / equal:.1f} x)"
        rows.append(row | {"dense model that remembers as much": of_dense, "runs": str(entry.runs)})
    table = markdown_table(list(rows[0]), [list(row.values()) for row in rows])
    text = (
        "Parameters are those of the towers' layers. A dense model that remembers as much lies between two "
        "of the table; of each size the one counts that remembers most, however long it trained. In brackets: how many "
        "times as many parameters the sparse model has. A row is the mean of so many runs."
    )
    page = f"{table}\n\n{text}\n\n![bits by parameters](knowledge.png)"
    pictures = {"knowledge.png": lambda path: _draw(knowledge, path)}
    write_page(output_dir / "knowledge", page, pictures, [asdict(entry) for entry in knowledge])
    return table


def _sizes(source: str) -> tuple[int, int, int]:
    """Experts, parameters and activated parameters of the layers of a model's folder."""
    config = config_of(clip_class(source), source)
    counts = count_parameters(meta_model(config))
    towers = (config.text_config, config.vision_config) if counts["expert"] else ()
    experts = max((tower.num_experts for tower in towers if tower.moe_layers), default=0)
    return experts, counts["layers"], counts["layers"] - counts["total"] + counts["activated"]


def _draw(knowledge: Sequence[Knowledge], path: Path) -> None:
    """Bits by parameters: a line through dense models for each number of names, and a mark for each sparse model."""
    figure, axis = plt.subplots(figsize=(8, 5))
    experts = sorted({entry.experts for entry in knowledge})
    for color, task in enumerate(dict.fromkeys(entry.task for entry in knowledge)):
        of_task = [entry for entry in knowledge if entry.task == task]
        style = {"color": f"C{color % 10}"}
        axis.axhline(of_task[0].to_remember, linestyle=":", linewidth=1, **style)
        place = (1.01, of_task[0].to_remember)
        axis.annotate(plot_text(task), place, xycoords=("axes fraction", "data"), va="center", **style)
        if dense := best_dense(knowledge, task):
            axis.plot(*zip(*dense, strict=True), **style)
        for entry in of_task:
            marker = MARKERS[experts.index(entry.experts) % len(MARKERS)]
            axis.plot(entry.parameters, entry.bits, marker, markersize=7, **style)
    for number, marker in zip(experts, MARKERS, strict=False):
        axis.plot([], [], marker, color="black", label=f"{number} experts" if number else "dense")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("parameters in the layers")
    axis.set_ylabel("bits remembered (dotted: all there are)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.02, 0.93))
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    write_knowledge.main()
