"""What runs logged, as curves and as a table: losses, balance, dropped tokens, temperature and scores over steps."""

import csv
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from clip_moe.evaluation.figures import grid, plot_text, plt, save
from clip_moe.records.files import new_file, output_folder, read_log
from clip_moe.records.markdown import markdown_table
from clip_moe.records.messages import join_names
from clip_moe.records.provenance import LOG

# What is logged of losses -> the title of its curve. Scores, TASK/METRIC, come after these.
TITLES = {
    "loss": "contrastive loss",
    "total_loss": "total loss",
    "balance_loss": "balance loss",
    "z_loss": "router z-loss",
    "local_entropy_text": "local entropy of texts (bits)",
    "local_entropy_vision": "local entropy of images (bits)",
    "global_entropy_text": "global entropy loss of texts (bits)",
    "global_entropy_vision": "global entropy loss of images (bits)",
    "dropped_tokens": "dropped tokens",
    "max_violation": "greatest violation of balance",
    "temperature": "temperature",
}
COLUMNS = 2  # of curves in the picture
WIDTH = 50  # letters in a line above a curve
FEW = 20  # points that are marked: one alone makes no line

# Step -> quantity -> value
Curve = dict[int, dict[str, float]]


def read_curves(runs: Sequence[Path], only: Sequence[str] = ()) -> dict[str, Curve]:
    """The curves of all stages that trained in these folders, by their names: with the run's, if there are several.

    Args:
        runs: folders of runs, or of single stages.
        only: quantities; none: all that were logged.
    """
    curves = {}
    for run in runs:
        logs = sorted([*run.glob(LOG), *run.glob(f"*/{LOG}")])
        if not logs:
            raise FileNotFoundError(f"{run} has no {LOG}: name the folder of a run, or of a stage that trains")
        for log in logs:
            name = log.parent.name if len(runs) == 1 else log.parent.relative_to(run.parent).as_posix()
            curves[name if name not in curves else str(log.parent)] = curve_of(log)
    logged = quantities(curves.values())
    missing = [name for name in only or ["loss"] if name not in logged]
    if missing:
        raise ValueError(f"not logged yet: {join_names(missing)}; logged is {join_names(logged) or None}")
    for values in (values for curve in curves.values() for values in curve.values()):
        for name in values.keys() - (only or logged):
            del values[name]
    return curves


def curve_of(log: Path) -> Curve:
    """What stands in a log: what is in `TITLES`, and scores."""
    curve: Curve = {}
    for values in read_log(log):
        if "logit_scale" in values:
            values["temperature"] = 1 / values["logit_scale"]
        plotted = {name: value for name, value in values.items() if name in TITLES or "/" in name}
        curve.setdefault(values["step"], {}).update(plotted)
    return curve


def quantities(curves: Iterable[Curve]) -> list[str]:
    """All that curves have, in the order of `TITLES`; then scores, in the order of the logs."""
    logged = dict.fromkeys(name for curve in curves for values in curve.values() for name in values)
    return [name for name in TITLES if name in logged] + [name for name in logged if name not in TITLES]


def write_table(curves: dict[str, Curve], path: Path) -> None:
    """One row a stage and step; a cell is empty where nothing was logged."""
    names = quantities(curves.values())
    with new_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", "step", *names])
        for stage, curve in curves.items():
            for step, values in sorted(curve.items()):
                writer.writerow([stage, step, *(values.get(name, "") for name in names)])


def draw(curves: dict[str, Curve], path: Path) -> None:
    """A picture with a panel for each quantity that changes, or for all if none does, and a line for each stage."""
    names = quantities(curves.values())
    values = {name: {of[name] for curve in curves.values() for of in curve.values() if name in of} for name in names}
    names = [name for name in names if len(values[name]) > 1] or names
    figure, axes = grid(len(names), COLUMNS, 6, 3.2)
    colors = plt.colormaps["tab10" if len(curves) <= 10 else "tab20"].colors
    for axis, name in zip(axes.flat, names, strict=False):
        for number, (stage, curve) in enumerate(curves.items()):
            points = [(step, values[name]) for step, values in sorted(curve.items()) if name in values]
            if points:
                steps, of_steps = zip(*points, strict=True)
                marker = "o" if name not in TITLES or len(points) <= FEW else None
                # The same one in every panel, also where other stages have nothing
                color, label = colors[number % len(colors)], plot_text(stage, 80)
                axis.plot(steps, of_steps, color=color, marker=marker, markersize=3, label=label)
        title = textwrap.fill(TITLES.get(name, name), WIDTH)
        axis.set(title="\n".join(plot_text(line, WIDTH) for line in title.split("\n")), xlabel="step")
        axis.grid(alpha=0.3)
    handles = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    with new_file(path) as partial:
        save(figure, partial)


def last_values(curves: dict[str, Curve]) -> str:
    """A table in markdown of the last value of every quantity: a row each, and a column for each stage."""
    last = [
        {name: value for _, values in sorted(curve.items()) for name, value in values.items()}
        for curve in curves.values()
    ]
    rows = [["step", *(str(max(curve, default=0)) for curve in curves.values())]]
    for name in quantities(curves.values()):
        cells = [f"{of_stage[name]:.4g}" if name in of_stage else "" for of_stage in last]
        rows.append([TITLES.get(name, name), *cells])
    return markdown_table(["last value", *curves], rows)


def write_curves(runs: Sequence[Path], output_dir: Path, only: Sequence[str] = ()) -> str:
    """Write `curves.png` and `curves.csv`. Returns the last values of every stage, as text."""
    with output_folder(output_dir):
        curves = read_curves(runs, only)
        write_table(curves, output_dir / "curves.csv")
        draw(curves, output_dir / "curves.png")
    return last_values(curves)
