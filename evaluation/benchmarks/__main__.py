"""Prints the benchmarks: names, metrics, groups, and where they are read from.

python -m clip_moe.evaluation.benchmarks
"""

from collections.abc import Sequence

from clip_moe.engine.command_line import command
from clip_moe.engine.markdown import item, markdown_table
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS, GROUPS, Benchmark
from clip_moe.evaluation.task import METRIC_TITLES, PRIMARY_METRICS


def metrics_of(benchmark: Benchmark) -> str:
    return ", ".join([METRIC_TITLES[name] for name in benchmark.metrics] or PRIMARY_METRICS[benchmark.kind].values())


def _language_pattern(benchmark: Benchmark, text: str) -> str:
    """The text with LANGUAGE in the place of the language at its end."""
    language = benchmark.language
    return f"{text.removesuffix(language)}LANGUAGE" if language and text.endswith(language) else text


def _group_members(names: Sequence[str]) -> list[str]:
    """The names of benchmarks; of a suite in several languages, the first name and the codes of the others."""
    languages = [BENCHMARKS[name].language for name in names]
    return [
        language if language and number else name
        for number, (name, language) in enumerate(zip(names, languages, strict=True))
    ]


@command
def benchmarks() -> str:
    """Print all benchmarks, how copies of them lie, and the groups that may be named in their place."""
    rows = BENCHMARKS.values()
    # One line for all languages of a suite
    what = dict.fromkeys(
        (_language_pattern(row, row.name), _language_pattern(row, row.protocol), metrics_of(row)) for row in rows
    )
    shapes: dict[str, dict[str, None]] = {}
    for row in rows:
        shapes.setdefault(row.shapes, {})[_language_pattern(row, row.name)] = None
    return "\n\n".join(
        [
            markdown_table(["name", "what", "metrics"], what),
            "A copy lies in a folder of the benchmark's name:",
            "\n".join(item(f"{shape}: {', '.join(names)}") for shape, names in shapes.items()),
            "On the Hub:",
            markdown_table(["name", "data set"], [[row.name, row.hub] for row in rows if row.hub]),
            "Groups:",
            "\n".join(item(f"{group}: {', '.join(_group_members(names))}") for group, names in GROUPS.items()),
        ]
    )


if __name__ == "__main__":
    benchmarks.main()
