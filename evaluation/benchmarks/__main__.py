"""Prints the benchmarks: names, metrics, groups, and where they are read from.

python -m clip_moe.evaluation.benchmarks
"""

from collections import defaultdict

from clip_moe.engine.command_line import command
from clip_moe.engine.markdown import item, markdown_table
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS, GROUPS
from clip_moe.evaluation.task import METRIC_TITLES, PRIMARY_METRICS


@command
def benchmarks() -> str:
    """Print all benchmarks, how copies of them lie, and the groups that may be named in their place."""
    rows = BENCHMARKS.values()
    metrics = [[METRIC_TITLES[name] for name in row.metrics] or PRIMARY_METRICS[row.kind].values() for row in rows]
    task_rows = [[row.name, row.protocol, ", ".join(titles)] for row, titles in zip(rows, metrics, strict=True)]
    names_of_shape = defaultdict(list)
    for row in rows:
        names_of_shape[row.shapes].append(row.name)
    return "\n\n".join(
        [
            markdown_table(["name", "what", "metrics"], task_rows),
            "A copy lies in a folder of the benchmark's name:",
            "\n".join(item(f"{shape}: {', '.join(names)}") for shape, names in names_of_shape.items()),
            "On the Hub:",
            markdown_table(["name", "data set"], [[row.name, row.hub] for row in rows if row.hub]),
            "Groups:",
            "\n".join(item(f"{group}: {', '.join(names)}") for group, names in GROUPS.items()),
        ]
    )


if __name__ == "__main__":
    benchmarks.main()
