"""Digests of a user's own code: modules outside of this package and of installed ones, and files beside them.

Imports are read from the source before a run. Files that code reaches in other ways, by importlib or as data, are noted
when they are opened.
"""

import ast
import functools
import importlib.util
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from clip_moe.engine.digests import file_digest

# This repository's packages, whose commit is in each record, and Python's own
PACKAGES = {"clip_moe", "lab", "modeling_clip_moe"}
OURS = {*PACKAGES, *sys.stdlib_module_names}
# Libraries, which a user may have installed from a checkout, outside of site-packages: no code of their own
LIBRARIES = {"accelerate", "datasets", "matplotlib", "numpy", "PIL", "scipy", "sklearn", "torch", "transformers"}
ROOMS = {path.name for path in Path(__file__).parents[1].iterdir() if (path / "__init__.py").is_file()}
ROOT, PYTHON = Path(__file__).resolve().parents[1], sysconfig.get_path("stdlib")

# Files that `imported_files` has found, of any stage
_imported: set[str] = set()
# Path -> when it was first opened to be read; and what was opened to be written
_opened: dict[str, float] = {}
_written: set[str] = set()
# Folders of modules, and of packages, whose files count
_folders: set[str] = set()
_packages: set[str] = set()
# Where modules were searched before what is watched began, which may add folders
_places: list[str] = []
_watching, _since = 0, 0.0  # when it began


def import_object(spelling: str, kind: str) -> Any:
    """The object that `package.module:NAME` names, with its module's imports noted. The working folder is searched
    first.

    Args:
        kind: what it should be, for the ValueError of one that cannot be imported.
    """
    module, _, name = spelling.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with watching():
            return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises
        raise ValueError(f"the {kind} {spelling!r} cannot be imported: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The error, with the place in one's own files that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen") and frame.filename not in ours]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    moved = f"; did you mean clip_moe.{missing}?" if missing and missing.split(".")[0] in ROOMS else ""
    return f"{type(error).__name__}: {error}{where}{moved}"


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Module -> digest of its file, for these modules and all that they import."""
    files = imported_files(modules)
    return {name: file_digest(files[name]) for name in sorted(files)}


def code_of_models() -> dict[str, str]:
    """`code_of` the modules whose models a user has registered, as they were when this was first asked for."""
    own = sys.modules.get("modeling_clip_moe.loading")  # where it was never imported, nothing is registered
    return _code_of_models(*own.OWN_CLASSES) if own else {}


@functools.cache
def _code_of_models(*models: type) -> dict[str, str]:
    return code_of({model.__module__ for model in models})


def imported_files(modules: Iterable[str]) -> dict[str, Path]:
    """Module -> file, for these modules and all of the user's own that they import, directly or not. A module of an
    installed package has its file alone. Nothing is imported: stages import heavy packages late."""
    importlib.invalidate_caches()
    found, waiting = {}, list(modules := list(modules))
    while waiting:
        name = waiting.pop()
        top = name.split(".")[0]
        if not name or name in found or top in OURS or (top in LIBRARIES and name not in modules):
            continue
        waiting.append(name.rpartition(".")[0])
        file = _file_of(name)
        if file is None or not (is_own := _is_own(str(file))) and name not in modules:
            continue
        found[name] = file
        if is_own:
            _note_module(str(file), "." in name)
            _imported.add(str(file))
            waiting += _imports(name, file)
    return found


def _file_of(name: str) -> Path | None:
    """The file of a module. None: a namespace package, no module, or not installed."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded).absolute() if os.path.isfile(loaded) else None
    parts = name.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    for number in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:number]), spec.submodule_search_locations)
    return Path(spec.origin).absolute() if spec is not None and spec.has_location else None


def _imports(name: str, path: Path) -> Iterator[str]:
    """Names of imported modules. `from a import b` also gives `a.b`, which may be none."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # a compiled one, or what raises where it is imported
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= package.count(".") + bool(package):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _is_own(path: str) -> bool:
    """Whether a file belongs to the user: not to Python, an installed package or this one."""
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts or path.startswith(f"{PYTHON}{os.sep}"):
        return False
    inside = Path(path).relative_to(ROOT).parts[0] if path.startswith(f"{ROOT}{os.sep}") else ""
    return inside not in PACKAGES | ROOMS


def _note_module(path: str, in_package: bool) -> None:
    folder = os.path.dirname(path)
    _folders.add(folder)
    if in_package or os.path.isfile(os.path.join(folder, "__init__.py")):
        _packages.add(folder)


def _note_open(event: str, arguments: tuple) -> None:
    """The hook of `watching`: notes own modules and what is read or written beside them."""
    if not _watching or event not in ("open", "os.rename"):
        return
    path = arguments[event == "os.rename"]  # its target
    if not isinstance(path, str | bytes | os.PathLike):
        return
    path = os.path.abspath(os.fsdecode(path))
    if path.endswith(".pyc"):
        try:
            path = importlib.util.source_from_cache(path)
        except ValueError:  # elsewhere than in __pycache__
            return
    is_module = path.endswith(".py") and _key(path, _search_path()) != path and _is_own(path)
    is_module = is_module and _key(path, _search_path()).split(os.sep)[0] not in LIBRARIES
    if is_module:
        _note_module(path, False)
    if is_module or os.path.dirname(path) in _folders or path.startswith(tuple(f"{p}{os.sep}" for p in _packages)):
        if event == "os.rename" or arguments[2] & (os.O_WRONLY | os.O_RDWR):
            _written.add(path)
        else:
            _opened.setdefault(path, time.time())


@contextmanager
def watching() -> Iterator[None]:
    """Note the files that this process opens meanwhile."""
    global _watching, _since
    _install()
    if not _watching:
        _places[:], _since = _search_path(), time.time()
    _watching += 1
    try:
        yield
    finally:
        _watching -= 1


@functools.cache
def _install() -> None:
    sys.addaudithook(_note_open)  # for good: Python removes none


def reached_code(elsewhere: Collection[str] = ()) -> dict[str, str]:
    """Path below a folder of modules -> digest, for the files that were noted.

    Args:
        elsewhere: files and folders without modules that count in another way, as data and outputs do.

    Raises:
        ValueError: a file has changed since.
    """
    others = [Path(os.path.abspath(path)) for path in elsewhere]
    others = [other for other in others if not any(Path(folder).is_relative_to(other) for folder in _folders)]
    files = {}
    for path in sorted(_opened.keys() - _written - _imported):
        if os.path.isfile(path) and not any(Path(path).is_relative_to(other) for other in others):
            if os.stat(path).st_ctime > _opened[path]:
                if _opened[path] < _since:  # by an earlier stage of this process
                    continue
                raise ValueError(f"{path} changed after it was read: run it again")
            files[_key(path, _places)] = file_digest(path)
    return files


def found_again(keys: Iterable[str]) -> dict[str, str]:
    """Current digests of the files of `reached_code`, without those that are gone."""
    paths = {key: [os.path.join(folder, key) for folder in _search_path()] for key in keys}
    files = {key: next(filter(os.path.isfile, of_key), None) for key, of_key in paths.items()}
    return {key: file_digest(file) for key, file in files.items() if file is not None}


def _search_path() -> list[str]:
    return [os.path.abspath(folder) for folder in (os.getcwd(), *sys.path)]


def _key(path: str, places: Iterable[str]) -> str:
    """A path relative to the first of these folders that contains it, or unchanged."""
    folder = next((folder for folder in places if path.startswith(f"{folder.rstrip(os.sep)}{os.sep}")), None)
    return path if folder is None else os.path.relpath(path, folder)
