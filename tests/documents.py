"""The pages of README and docs, their blocks of code, and how these run: as they stand, in a folder where `stand_ins`
has put what they name. A page is one reader: its blocks run in their order.

bash runs the bash blocks. The commands in COMMANDS come back to this process, which has imported torch already.
"""

import functools
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from packaging.requirements import Requirement

import clip_moe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose blocks other tests run
ELSEWHERE = {
    "integrations.md": "integration/test_integrations_page.py",
    "extending.md": "test_extending.py",
    "own_pictures.md": "integration/test_icons.py",
}
RUN, SHOWN = ("bash", "python", "yaml"), ("text", "bibtex", "json")

# What a command of a page gets in addition, so that it takes seconds: text in the command -> arguments.
STEP = "--defaults.train.num_epochs null --defaults.train.max_steps 1 --defaults.train.save_steps null "
PAIRS = "--defaults.train.data.num_samples 32 --defaults.train.global_batch_size "
SMALL = STEP + PAIRS + "4 --defaults.embed.data.num_samples 32 --direct.max_steps 1 --direct.warmup_steps 0 "
SMALL += "--evaluation.tasks [symbols_pairs,symbols_retrieval] "
CLIP_MOE_DEMO = "--config training/recipes/clip_moe_demo.yaml " + SMALL
SMALLER = {
    "--config training/recipes/clip_moe_demo.yaml": SMALL,
    "--clip_moe.max_steps 50": "--clip_moe.max_steps 2",
    "train --seed": STEP + PAIRS + "4 --seed_model.max_steps 1 --defaults.train.warmup_steps 0 "
    "--stages initialized,seed_model,dense,evaluation --evaluation.tasks [names_256] --evaluation.baseline seed "
    "--evaluation.models '{seed: seed_model, dense: dense}'",
    "--config training/recipes/clip_moe_symbols.yaml": STEP + PAIRS + "4 --defaults.embed.data.num_samples 32 "
    "--long_clip.num_components 2 --stages features_0,clusters_1,expert_1",
    "--config training/recipes/clip_fmoe_symbols.yaml": STEP + "--defaults.train.global_batch_size 4 "
    "--captions.data.num_samples 32 --direct_2x.num_epochs null --clusters.num_image_clusters 2 "
    "--sub_clusters.num_image_clusters 1 --sub_clusters.num_text_clusters 2 "
    "--stages captions,fused,features,clusters,sub_clusters,clip_fmoe_1",
    "--config training/recipes/mode_symbols.yaml": STEP + "--defaults.train.global_batch_size 4 "
    "--defaults.train.data.num_samples 160 --defaults.embed_captions.data.num_samples 160 "
    "--stages captions,fine,clusters,expert_1,expert_2,expert_3,expert_4,mode",
    "--config training/recipes/llava_symbols.yaml": "--projector.max_steps 2 --instructed.max_steps 2 "
    "--defaults.train_llava.data.num_samples 64",
    "data.worlds icons": "--kinds 'brands 16' --number 64",
    "--config training/recipes/own_pictures.yaml": "--defaults.train.global_batch_size 16 "
    "--defaults.train.warmup_steps 0 --seed_model.max_steps 1 --dense_short.max_steps 1 --sparse_short.max_steps 1 "
    "--dense_long.max_steps 1 --sparse_long.max_steps 1",
    "--config my_recipe.yaml": "--trained.global_batch_size 4 --trained.max_steps 1",
    "--base-model user/base": "--dry-run runs/uploaded",  # in place of the Hub
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
        run_bash(block)


# --- bash


def run_bash(block: Block) -> None:
    calls, calls_of_bash = os.pipe()
    answers_to_bash, answers = os.pipe()
    functions = [
        f'{name}() {{ printf "%s\\0" $(($# + 1)) {name} "$@" >&{calls_of_bash}; '
        f"read -r status <&{answers_to_bash}; return $status; }}"
        for name in COMMANDS
    ]
    script = "\n".join(["set -e", *functions, block.text])
    process = subprocess.Popen(["bash", "-c", script], pass_fds=(calls_of_bash, answers_to_bash))
    os.close(calls_of_bash)
    os.close(answers_to_bash)
    problem = None
    with open(calls, "rb", buffering=0) as calls, open(answers, "wb", buffering=0) as answers:
        while count := _word(calls):
            name, *arguments = [_word(calls) for _ in range(int(count))]
            problem = problem or COMMANDS[name](arguments)
            answers.write(b"1\n" if problem else b"0\n")
    status = process.wait()
    assert not problem and status == 0, f"{block}: {problem or 'failed'}\n{block.text}"


def _word(file) -> str:
    """Up to the next NUL, or nothing at the end."""
    word = b""
    while (byte := file.read(1)) not in (b"", b"\0"):
        word += byte
    return word.decode()


def _python(arguments: list[str]) -> str | None:
    """`python -m MODULE ARGUMENTS`, in this process; `python FILE ARGUMENTS`. Returns what is wrong, or nothing."""
    if arguments[0] != "-m":
        return _started([])(arguments)
    room, _, name = arguments[1].partition(".")
    commands = importlib.import_module(f"{room}.commands") if find_spec(f"{room}.commands") else None
    command = getattr(commands, {"training.upcycle": "train"}.get(arguments[1], name), None)
    if command:
        return _called(command.main, arguments[1:], 1)
    with mock.patch("sys.argv", _smaller(arguments[1:])):
        return _called(lambda words: runpy.run_module(words[0], run_name="__main__", alter_sys=True), arguments[1:])


def _called(main, arguments: list[str], first: int = 0) -> str | None:
    """A function with the arguments from the first one on, in this process. Returns what is wrong, or nothing."""
    try:
        main(_smaller(arguments)[first:])
    except SystemExit as stop:
        return f"{' '.join(arguments)}: {stop.code}" if stop.code else None
    return None


def _smaller(arguments: list[str]) -> list[str]:
    line = " ".join(arguments)
    return [*arguments, *(more for text, tail in SMALLER.items() if text in line for more in shlex.split(tail))]


def _started(launcher: list[str]):
    """A launcher's command, in processes of its own."""

    def run(arguments: list[str]) -> str | None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, *launcher, *_smaller(arguments)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        return done.stderr if done.returncode else None

    return run


def _make(targets: list[str]) -> str | None:
    """Is not run: the targets are there; without one, the first rule of the Makefile makes the environment."""
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    missing = {target for target in targets if "=" not in target} - {name for rule in rules for name in rule.split()}
    return f"the Makefile has no {', '.join(missing)}" if missing else None


def _pip(arguments: list[str]) -> str | None:
    """Is not run: the packages are names or addresses, and the extras are those of setup.py."""
    assert arguments[0] == "install", arguments
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for package in (argument for argument in arguments[1:] if not argument.startswith("-")):
        if package.startswith("git+https://"):
            assert package.endswith("/clip-moe"), package
        elif package.startswith("."):
            extra = package[1:].strip("[]")
            if extra and f'"{extra}": {extra}' not in setup:
                return f"setup.py has no extra {extra}"
        else:
            Requirement(package)
    return None


def _git(arguments: list[str]) -> str | None:
    """Is not run: it clones a repository of this name."""
    return None if arguments[0] == "clone" and arguments[1].endswith("/clip-moe") else f"git {' '.join(arguments)}"


COMMANDS = {
    "python": _python,
    "clip-moe": functools.partial(_called, clip_moe.main),
    "accelerate": _started(["-m", "accelerate.commands.accelerate_cli"]),
    "torchrun": _started(["-m", "torch.distributed.run"]),
    "pip": _pip,
    "make": _make,
    "git": _git,
}
