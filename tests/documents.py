"""The pages of README and docs, their blocks of code, and how these run: as they are printed, in a folder where
`stand_ins` has put what they name. A page is one reader: its blocks run in their order, with smaller numbers.
"""

import contextlib
import glob
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import clip_moe
from clip_moe.data import symbols
from clip_moe.data.world import World

ROOT = Path(__file__).parents[1]
BASE = ROOT / "training" / "symbol_clip"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose blocks other tests run
ELSEWHERE = {
    "settings.md": "test_docs.py",
    "integrations.md": "integration/test_integrations_page.py",
    "extending.md": "test_extending.py",
    "own_pictures.md": "integration/test_icons.py",
}
RUN, SHOWN = ("bash", "python", "yaml"), ("text", "bibtex", "json")

LARGEST_TEST = 24  # pictures in a test of a built-in world
# Tests do not install
NOT_RUN = ("git", "cd", "make", ".", "pip", "apt-get", "for", "export")

# Arguments that make a page's command take seconds: text in the command -> arguments.
STEP = "--defaults.train.num_epochs null --defaults.train.max_steps 1 --defaults.train.save_steps null "
PAIRS = "--defaults.train.data.num_samples 32 --defaults.train.global_batch_size "
SMALL = STEP + PAIRS + "4 --defaults.embed.data.num_samples 32 --direct.max_steps 1 --direct.warmup_steps 0 "
SMALL += "--evaluation.tasks [symbols_pairs,symbols_retrieval] "
SMALLER = {
    "--config training/recipes/clip_moe_demo.yaml": SMALL,
    "--clip_moe.max_steps 50": "--stages direct,averaged,features_0,clusters_1,expert_1",
    "clip-moe analyze": "--max_rows 8",
    "--tasks names_4096": "--max_rows 64",
    "run --seed": STEP + PAIRS + "4 --seed_model.max_steps 1 --defaults.train.warmup_steps 0 "
    "--stages initialized,seed_model,dense,evaluation --evaluation.tasks [names_256] --evaluation.max_rows 64 "
    "--evaluation.baseline seed "
    "--evaluation.models '{seed: seed_model, dense: dense}'",
    "--config training/recipes/clip_fmoe_symbols.yaml": STEP + "--defaults.train.global_batch_size 4 "
    "--captions.data.num_samples 32 --direct_2x.num_epochs null --clusters.num_image_clusters 2 "
    "--sub_clusters.num_image_clusters 1 --sub_clusters.num_text_clusters 2 "
    "--stages captions,fused,features,clusters,sub_clusters,clip_fmoe_1",
    "--config training/recipes/mode_symbols.yaml": STEP + "--defaults.train.global_batch_size 4 "
    "--defaults.train.data.num_samples 160 --defaults.embed.data.num_samples 160 "
    "--stages captions,clusters,expert_1,expert_2,expert_3,expert_4,mode",
    "--config lab/recipes/llava_symbols.yaml": "--projector.max_steps 2 --instructed.max_steps 2 "
    "--defaults.train_llava.data.num_samples 64",
    "clip-moe train runs/moe-vie-tuned": "--max_steps 2",
    "data.draw symbols": "--number 64",
    "clip-moe finetune": "--global_batch_size 16 --defaults.train.num_epochs 1 --report.max_rows 32",
    "data.draw icons": "--kinds 'brands 16' --number 64",
    "--config training/recipes/own_pictures.yaml": "--defaults.train.global_batch_size 16 "
    "--defaults.train.warmup_steps 0 --seed_model.max_steps 1 --dense_short.max_steps 1 --sparse_short.max_steps 1 "
    "--dense_long.max_steps 1 --sparse_long.max_steps 1",
    "--config my_recipe.yaml": "--defaults.train.global_batch_size 4 --sparse.max_steps 1 --dense.max_steps 1",
}


@dataclass
class Block:
    page: Path
    section: str  # the heading "## ..." above
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found, start, section = [], None, ""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and start is None:
            start, language = number, line[3:]
        elif line == "```":
            found.append(Block(page, section, start + 1, language, "\n".join(lines[start : number - 1]) + "\n"))
            start = None
        elif line.startswith("## ") and start is None:
            section = line[3:]
    assert start is None, f"{page.name}:{start}: a block without an end"
    return found


@contextlib.contextmanager
def few_symbols() -> Iterator[None]:
    """The tests of the built-in worlds have fewer pictures."""

    def smaller(load):
        def loaded(*arguments, **options):
            is_test = "test" in arguments
            return load(*(min(a, LARGEST_TEST) if type(a) is int and is_test else a for a in arguments), **options)

        return loaded

    pairs = smaller(symbols.load_minimal_pairs)
    with mock.patch.object(World, "load", smaller(World.load)), mock.patch.object(symbols, "load_minimal_pairs", pairs):
        yield


def run_page(page: Path) -> None:
    """Runs all blocks of a page in the current folder."""
    for block in blocks(page):
        run_block(block)


def run_block(block: Block) -> None:
    first, _, rest = block.text.partition("\n")
    file = re.fullmatch(r"# (\S+\.(yaml|py))", first)
    if file:
        Path(file[1]).write_text(rest, encoding="utf-8")
    elif block.language == "python":
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        exec(code, {"__name__": "__main__"})
    elif block.language == "bash":
        for line in lines(block):
            run_line(line)


def lines(block: Block) -> list[str]:
    """The commands of a block, without comments."""
    commands = [line.partition(" # ")[0] for line in block.text.replace("\\\n", " ").splitlines()]
    return [line for line in commands if line and not line.startswith("#")]


def run_line(line: str) -> None:
    """Run a command with smaller numbers: ours in this process, which has imported torch, others in bash."""
    more = " ".join(arguments for text, arguments in SMALLER.items() if text in line)
    for flag in re.findall(r"--\S+", more):  # given once: with the smaller value
        line = re.sub(rf" {re.escape(flag)} \S+", "", line)
    line = f"{line} {more}"
    program, *arguments = words(line)
    if program in NOT_RUN:
        return
    if program == "clip-moe":
        clip_moe.main(arguments)
    elif program == "python" and arguments[0] == "-m":
        with mock.patch("sys.argv", arguments[1:]):
            try:
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                assert not end.code, f"{line}: {end.code}"
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": modules}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def words(line: str) -> list[str]:
    """The words of a command, with the files that a pattern such as runs/*.json names."""
    return [name for word in shlex.split(line) for name in sorted(glob.glob(word)) or [word]]
