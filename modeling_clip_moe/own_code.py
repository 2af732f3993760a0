"""The code of custom models, written for folders of weights that are loaded without this package."""

import re
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

PACKAGE = Path(__file__).parent
# Registered classes -> their files
OWN_CLASSES: dict[type, Path] = {}
# `from modeling_clip_moe.sparse_moe import ...`
OF_PACKAGE = re.compile(rf"^(\s*)from {PACKAGE.name}\.(\w+) import", flags=re.MULTILINE)


def with_relative_imports(source: Path) -> str:
    """The code of a custom model's file with imports of files beside it in place of imports from this package.

    Raises:
        ValueError: a folder of weights would lack what it imports, or its name is that of a file of this package.
    """
    code = OF_PACKAGE.sub(r"\1from .\2 import", source.read_text(encoding="utf-8"))
    imported = re.findall(r"^\s*(?:import|from) (\w+)", code, flags=re.MULTILINE)
    beside = sorted({name for name in imported if source.with_name(f"{name}.py").is_file()})
    refusals = {
        f"has the name of a file of {PACKAGE.name}, which is published beside weights, too: rename it": (
            (PACKAGE / source.name).is_file()
        ),
        f"imports {PACKAGE.name}, which is not there where its weights are loaded with trust_remote_code: import from "
        f"its files, as in `from {PACKAGE.name}.sparse_moe import CLIPMoERouter`": PACKAGE.name in imported,
        f"imports {', '.join(beside)}, which no folder of weights would hold: put all into one file": bool(beside),
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"{source} {refusal}")
    return code


def write_own_code(source: Path, folder: Path) -> None:
    """Write a custom model's file next to its weights, and the files of this package that it needs."""
    (folder / source.name).write_text(code := with_relative_imports(source), encoding="utf-8")
    for name in re.findall(r"^\s*from \.(\w+) import", code, flags=re.MULTILINE):
        first = PACKAGE / f"{name}.py"
        for path in [first, *map(Path, get_relative_import_files(first))] if first.is_file() else ():
            shutil.copy(path, folder)
