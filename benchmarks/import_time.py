"""
Time to import this package over the time to import transformers' own CLIP, in alternating processes.

    python -m benchmarks.import_time --output benchmarks/results/import_time_cpu.md
"""

import argparse
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from records.files import write_text

OWN = "import modeling_clip_moe"
CLIP = "from transformers import CLIPModel, CLIPProcessor"


def measure(statement: str) -> float:
    """Seconds that the processor spends on a process which only imports: other programs disturb it least."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.import_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20, help="of each (default: 20)")
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    options = parser.parse_args()
    measure(CLIP), measure(OWN)  # what reads files into the page cache and compiles them
    pairs = [(measure(CLIP), measure(OWN)) for _ in range(options.runs)]
    ratio = statistics.median(own / clip for clip, own in pairs)
    table = [
        f"`{' '.join(['python -m benchmarks.import_time', *sys.argv[1:]])}`",
        "",
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Median seconds of the processor over {options.runs} processes each, "
        "one after the other in turn, and the median ratio of the pairs.",
        "",
        "| import | seconds | ratio |",
        "|---|---|---|",
        f"| `{CLIP}` | {statistics.median(clip for clip, _ in pairs):.2f} | 1 |",
        f"| `{OWN}` | {statistics.median(own for _, own in pairs):.2f} | {ratio:.3f} |",
    ]
    print("\n".join(table))
    if options.output:
        write_text(options.output, "\n".join(table))


if __name__ == "__main__":
    main()
