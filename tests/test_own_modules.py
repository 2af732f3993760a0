"""A user's own code is part of a record: however a stage or a model reaches it, a change is not skipped."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from records import own_modules
from training.recipe import Recipe, validated
from training.runner import run_recipe

STAGE = """
import importlib
from pathlib import Path
from pydantic.dataclasses import dataclass
from training.settings import STRICT
from training.stages.base import Stage

@dataclass(config=STRICT, kw_only=True)
class Mine(Stage):
    helper: str = "none"
    def run(self, inputs, context, directory):
        {body}
"""
# Files beside the recipe, and what `run` does with them
CASES = {
    "importlib": ({"own/helper.py": "VALUE = 1"}, "importlib.import_module('own.help' + 'er').VALUE"),
    "named_by_a_setting": ({"own/none.py": "VALUE = 1"}, "importlib.import_module(f'own.{self.helper}').VALUE"),
    "sibling_package": ({"other/__init__.py": "", "other/part.py": "VALUE = 1"}, "__import__('other.part').part.VALUE"),
    "namespace_package": ({"spaces/deep/part.py": "VALUE = 1"}, "importlib.import_module('spaces.deep.part').VALUE"),
    "imported_late": ({"late.py": "VALUE = 1"}, "exec('import late')"),
    "pythonpath": ({"lib/far.py": "VALUE = 1"}, "importlib.import_module('far').VALUE"),
    "imported_from_pythonpath": ({"lib/near.py": "VALUE = 1"}, "Path; from near import VALUE"),
    "a_path_of_its_own": (
        {"elsewhere/odd.py": "VALUE = 1"},
        "import sys; sys.path.append('elsewhere'); importlib.import_module('odd').VALUE",
    ),
    "a_file_as_a_module": (
        {"own/plain.py": "VALUE = 1"},
        "from importlib import util; s = util.spec_from_file_location('x', Path(__file__).with_name('plain.py')); "
        "s.loader.exec_module(util.module_from_spec(s))",
    ),
    "data_beside": ({"own/words.txt": "1"}, "Path(__file__).with_name('words.txt').read_text()"),
    "data_below": ({"own/assets/words.json": "1"}, "(Path(__file__).parent / 'assets/words.json').read_bytes()"),
    "data_of_a_helper": (
        {"lib/reads.py": "VALUE = open(__file__[:-8] + 'words.csv').read()", "lib/words.csv": "1"},
        "importlib.import_module('reads').VALUE",
    ),
}
BESIDE = {"data_of_a_helper": "lib/words.csv", "sibling_package": "other/part.py"}


CHANGED = {"data_of_a_helper": "lib/words.csv", "sibling_package": "other/part.py"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder of a process that has imported nothing of a user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "lib"), *sys.path])
    for name in ("_imported", "_opened", "_written", "_folders", "_packages"):
        monkeypatch.setattr(own_modules, name, type(getattr(own_modules, name))())
    before = set(sys.modules)
    yield tmp_path
    forget(before)


def forget(before):
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) is None or "pytest-" in sys.modules[name].__file__:
            del sys.modules[name]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def run(**settings):
    """A run of the stage with what is imported anew, as in another process."""
    forget(BEFORE)
    importlib.invalidate_caches()
    own_modules._opened.clear()
    stage = {"name": "mine", "stage": "own.stages:Mine"} | settings
    run_recipe(validated(Recipe, {"output_dir": "runs", "stages": [stage]}, "recipe"))
    return json.loads(Path("runs/mine/manifest.json").read_text())


BEFORE = set(sys.modules)


@pytest.mark.parametrize("case", CASES)
def test_a_change_of_what_a_stage_reaches_is_refused(folder, capsys, case):
    files, body = CASES[case]
    write(folder, files | {"own/stages.py": STAGE.format(body=body)})
    record = run()
    assert run() == record and "mine: done before, skipped" in capsys.readouterr().out
    name = CHANGED.get(case, next(iter(files)))
    (folder / name).write_text("VALUE = 2")
    with pytest.raises(ValueError, match="runs/mine was made with other code"):
        run()
    (folder / name).unlink()
    with pytest.raises(ValueError, match="other code .* -> None" if name.endswith(".py") else "."):
        run()
