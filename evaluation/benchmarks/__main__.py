"""Prints the benchmarks: names, metrics, groups, and where they are read from.

python -m evaluation.benchmarks
"""

from evaluation.benchmarks.specs import BENCHMARKS, GROUPS, Benchmark
from evaluation.task import METRIC_TITLES, PRIMARY_METRICS
from records.command_line import command
from records.markdown import item, markdown_table


def metrics_of(benchmark: Benchmark) -> str:
    return ", ".join([METRIC_TITLES[name] for name in benchmark.metrics] or PRIMARY_METRICS[benchmark.kind].values())


@command
def benchmarks() -> str:
    """Print all benchmarks, how copies of them lie, and the groups that may be named in their place."""
    rows = BENCHMARKS.values()
    what = [[row.name, row.protocol, metrics_of(row)] for row in rows]
    shapes: dict[str, list[str]] = {}
    for row in rows:
        shapes.setdefault(row.shapes, []).append(row.name)
    return "\n\n".join(
        [
            markdown_table(["name", "what", "metrics"], what),
            "A copy lies in a folder of the benchmark's name:",
            "\n".join(item(f"{shape}: {', '.join(names)}") for shape, names in shapes.items()),
            "On the Hub:",
            markdown_table(["name", "data set"], [[row.name, row.hub] for row in rows if row.hub]),
            "Groups:",
            "\n".join(item(f"{group}: {', '.join(names)}") for group, names in GROUPS.items()),
        ]
    )


if __name__ == "__main__":
    benchmarks.main()
