"""The code of a class of one's own, made for a folder of weights that is loaded without this package."""

import re
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

PACKAGE = Path(__file__).parent
# `from modeling_clip_moe.sparse_moe import ...`
OF_PACKAGE = re.compile(rf"^(\s*)from {PACKAGE.name}\.(\w+) import", flags=re.MULTILINE)


def with_relative_imports(source: Path) -> str:
    """A file of one's own that imports from the files of this package as from files beside it.

    Raises:
        ValueError: it imports the package itself, which a folder of weights does not hold.
    """
    code = OF_PACKAGE.sub(r"\1from .\2 import", source.read_text(encoding="utf-8"))
    if re.search(rf"^\s*(import|from) {PACKAGE.name}\b", code, flags=re.MULTILINE):
        raise ValueError(
            f"{source} imports {PACKAGE.name}, which is not there where its weights are loaded with trust_remote_code: "
            f"import from its files, as in `from {PACKAGE.name}.sparse_moe import CLIPMoERouter`"
        )
    return code


def write_own_code(source: Path, folder: Path) -> None:
    """Write a file of one's own beside weights, and the files of this package that it needs."""
    (folder / source.name).write_text(code := with_relative_imports(source), encoding="utf-8")
    for name in re.findall(r"^\s*from \.(\w+) import", code, flags=re.MULTILINE):
        first = PACKAGE / f"{name}.py"
        for path in [first, *map(Path, get_relative_import_files(first))] if first.is_file() else ():
            shutil.copy(path, folder)
