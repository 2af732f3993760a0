"""Prints the benchmarks: names, metrics, groups, and where they are read from.

python -m evaluation.benchmarks
"""

from evaluation.benchmarks.specs import BENCHMARKS, GROUPS, Benchmark
from evaluation.task import METRIC_TITLES, PRIMARY_METRICS
from records.markdown import markdown_table


def row(benchmark: Benchmark) -> list[str]:
    metrics = [METRIC_TITLES[name] for name in benchmark.metrics] or PRIMARY_METRICS[benchmark.kind].values()
    return [
        benchmark.name,
        benchmark.protocol,
        ", ".join(metrics),
        " ".join(group for group, names in GROUPS.items() if benchmark.name in names),
        benchmark.hub or "",
        benchmark.shapes,
    ]


if __name__ == "__main__":
    print(
        markdown_table(
            ["name", "what", "metric", "groups", "on the Hub", "a copy"], list(map(row, BENCHMARKS.values()))
        )
    )
