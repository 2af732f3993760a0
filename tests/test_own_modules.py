"""A user's own code is part of a record: however a stage or a model reaches it, a change is not skipped."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from documents import BASE

from clip_moe.engine import own_modules
from clip_moe.engine.provenance import Record
from clip_moe.engine.recipe import Recipe, validated
from clip_moe.engine.runner import run_recipe

STAGE = """
import importlib
from pathlib import Path
from pydantic.dataclasses import dataclass
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Stage

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
    "a_folder_of_its_own": (
        {"../outside/far_away.py": "VALUE = 1"},
        "import sys; sys.path.append(str(Path('../outside').resolve())); importlib.import_module('far_away').VALUE",
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
# Case -> the file that changes, if it is not the first one
CHANGED = {"data_of_a_helper": "lib/words.csv", "sibling_package": "other/part.py"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder of a process that has imported nothing of a user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
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


@pytest.mark.parametrize("module", ["lab.mine", "code", "engine.mine"])
def test_code_called_like_a_module_of_python_or_of_this_repository_counts(folder, monkeypatch, module):
    name, package = f"{module.replace('.', '/')}.py", module.split(".")[0]
    for other in {module, package} & {*sys.modules}:
        monkeypatch.delitem(sys.modules, other)
    write(folder, {f"{package}/__init__.py": ""} if package != module else {})
    write(folder, {name: STAGE.format(body="pass")})
    run(stage=f"{module}:Mine")
    sys.modules.pop(module)
    write(folder, {name: STAGE.format(body="2")})
    with pytest.raises(ValueError, match="runs/mine was made with other code .* choose another output folder$"):
        run(stage=f"{module}:Mine")


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


def test_what_is_beside_but_not_read_does_not_count(folder, capsys):
    """Nor does a file that the stage writes itself, or one that the recipe names as data."""
    body = "p = Path(__file__).with_name('kept.txt'); p.write_text('1'); p.read_text(); Path(self.helper).read_text()"
    write(folder, {"own/stages.py": STAGE.format(body=body), "own/named/photos.csv": "1", "own/unused.py": ""})
    assert run(helper="own/named/photos.csv")["reached"] == {}
    write(folder, {"own/kept.txt": "2", "own/named/photos.csv": "2", "own/unused.py": "1", "own/notes.md": "new"})
    run(helper="own/named/photos.csv")
    assert "mine: done before, skipped" in capsys.readouterr().out


def test_a_file_that_changes_while_a_stage_runs_ends_it(folder):
    body = "p = Path(__file__).with_name('words.txt'); p.read_text(); import os, time; time.sleep(0.05); "
    write(folder, {"own/stages.py": STAGE.format(body=f"{body}os.system(f'echo 2 > {{p}}')"), "own/words.txt": "1"})
    with pytest.raises(ValueError, match="mine: .*/own/words.txt changed after it was read"):
        run()
    assert not Path("runs/mine").exists()


def test_code_of_a_model_of_ones_own_counts_for_every_stage(folder, monkeypatch, capsys):
    """That of a registered class and of what it imports, whichever stage runs; without `--import`, it is refused."""

    def run_with(*modules):
        forget(BEFORE)
        monkeypatch.setattr(
            "modeling_clip_moe.loading.OWN_CLASSES", {importlib.import_module(m).Mine: m for m in modules}
        )
        stage = {"name": "mean", "stage": "average", "models": [str(BASE)]}
        run_recipe(validated(Recipe, {"output_dir": "runs", "stages": [stage]}, "recipe"))

    write(folder, {"mine.py": "from parts import router\nclass Mine: pass\n", "parts/router.py": "NOISE = 1\n"})
    run_with("mine")
    assert Record.read(Path("runs/mean")).code.keys() == {"mine", "parts.router"}
    run_with("mine")
    assert "mean: done before, skipped" in capsys.readouterr().out
    with pytest.raises(ValueError, match="runs/mean was made with other code .*code.mine: '.*' -> None"):
        run_with()
    (folder / "parts/router.py").write_text("NOISE = 2\n")
    with pytest.raises(ValueError, match=r"runs/mean was made with other code .code.parts.router: '.*' -> '.*'.\."):
        run_with("mine")


def test_a_library_in_a_checkout_of_its_own_counts_by_its_version(folder, monkeypatch):
    write(
        folder, {"lib/transformers/__init__.py": "from . import utils", "lib/transformers/utils.py": "", "mine.py": ""}
    )
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    (folder / "mine.py").write_text("import transformers.utils, numpy, json\nfrom . import nothing\ndef broken(:\n")
    assert own_modules.imported_files(["mine"]).keys() == {"mine"}
    (folder / "mine.py").write_text("import transformers.utils, numpy, json, zipp, nowhere\n")
    assert own_modules.imported_files(["mine"]).keys() == {"mine"}
