"""The worlds of molecules and characters: their captions, what is drawn, and CLIP-UP's recipe on them."""

from importlib.util import find_spec

import numpy as np
import pytest
from test_worlds import not_installed, require_parts, require_same_rows
from transformers import AutoModel

from clip_moe.data.worlds import world
from clip_moe.evaluation.tasks import find_tasks
from clip_moe.training.commands import run
from lab import ROOT
from lab.law.cases import Case, arguments
from lab.worlds import SOURCES, characters, molecules, some_kinds

PAGE = (ROOT / "lab" / "worlds" / "README.md").read_text(encoding="utf-8")
RDKIT = pytest.mark.skipif(find_spec("rdkit") is None, reason="rdkit is not installed")
DEBIAN = pytest.mark.skipif(
    set(characters.versions()) != set(characters.FILES), reason="Debian's packages for characters are not installed"
)


@pytest.fixture(params=[pytest.param("characters", marks=DEBIAN), pytest.param("molecules", marks=RDKIT)])
def name(request):
    return request.param


def names_of(name, kind):
    """The captions that are of one kind alone."""
    if name == "molecules":
        return molecules.molecule(kind).names
    return (characters.caption(kind, "web"), characters.caption(kind, "detailed"))


def test_rows_follow_from_their_arguments(name):
    require_parts(world(SOURCES[name]))
    require_same_rows(world(SOURCES[name]))
    task = find_tasks([f"{SOURCES[name]} 256"], seed=3)[f"{name}_256"]
    assert task.title == f"256 {name}" and len(task.load()[0]) == 256


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("clip_moe.engine.provenance.version", not_installed)
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path))
    with pytest.raises(ValueError, match="characters need unicode-data, which is not installed: apt-get install unic"):
        characters._characters.__wrapped__()
    with pytest.raises(ValueError, match="molecules need chemicals, which is not installed: pip install chemicals rd"):
        molecules._molecules.__wrapped__()


def test_no_two_kinds_have_one_caption(name):
    kinds = world(SOURCES[name]).kind_set("all")
    kind_texts = [{text.replace(" ", "") for text in names_of(name, kind)} for kind in kinds]
    assert len(set.union(*kind_texts)) == sum(map(len, kind_texts))
    first = [names_of(name, kind)[0] for kind in kinds]
    tokenizer = world(SOURCES[name]).build_tokenizer(64)
    read = [tuple(tokens.ids) for tokens in tokenizer.backend_tokenizer.encode_batch(first)]
    assert len(set(read)) == len(kinds) and max(map(len, read)) <= 62
    assert f"{len(kinds):,} {name}" in PAGE
    assert not any(molecules._CATALOG.fullmatch(text) for text in first) or name != "molecules"


def test_halves_of_all_numbers_are_apart():
    few, many = ({half: set(some_kinds("x", f"{n} half {half}", 5000)) for half in (1, 2)} for n in (1024, 4096))
    assert few[1] < many[1] and few[2] < many[2] and not many[1] & many[2] and len(many[2]) == 2048
    assert many[1] | many[2] == set(some_kinds("x", "4096", 5000)) and len(some_kinds("x", "all", 5000)) == 5000
    for name in ("1024 half 3", "5001", "1"):
        with pytest.raises(ValueError, match=f"x have no set of kinds '{name}': it is all or a number from 2 to 5000"):
            some_kinds("x", name, 5000)


@RDKIT
def test_what_a_formula_shows():
    """Oxygen is red, wherever it is; a caption is any name of the molecule."""
    numbers = {names_of("molecules", kind)[0]: kind for kind in molecules.MOLECULES.kind_set("all")}
    for text, is_red in {"benzene": False, "ethanol": True}.items():
        (row,) = molecules.MOLECULES.load("test", "detailed", 1, [numbers[text]], captions_per_image=20)
        red, green, _ = np.moveaxis(np.asarray(row["image"]).astype(int), -1, 0)
        assert row["image"].size == (64, 64) and bool((red - green > 100).any()) == is_red and red.min() < 100
        assert 1 < len(set(row["caption"])) and set(row["caption"]) <= set(molecules.molecule(numbers[text]).names)


@DEBIAN
def test_test_pictures_are_in_a_font_of_their_own():
    fonts = {}
    for split, packages in characters.FONTS.items():
        rows = characters.CHARACTERS.load(split, "facts", 60, [7])
        fonts[split] = set(rows["font"])
        assert fonts[split] == set(packages) and set(rows["caption"]) == {characters.character(7).reading}
    assert not fonts["train"] & fonts["test"]
    for font in set.union(*fonts.values()):  # each draws another thing for another character
        drawn = [characters._glyph(characters.character(kind).text, font, 28) for kind in range(1024)]
        assert len({mask.tobytes() for mask in drawn}) == 1024 and min(mask.max() for mask in drawn) > 0.3


def test_the_recipe_runs(name, tmp_path, capsys):
    """As a case of lab/law/README.md, in few steps."""
    case = Case(name, 1024, 8, 1, experts=4)
    few = {"seed_steps": 2, "dense_steps": 2, "sparse_steps": 2, "num_samples": 64, "batch_size": 32}
    run_of = {"config": ROOT / "lab/recipes/clip_up_worlds.yaml", "output-dir": tmp_path / "out"}
    flags = [*arguments(case), *(word for key, value in (few | run_of).items() for word in (f"--{key}", value))]
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    run.main([str(word) for pair in values.items() for word in pair])
    assert f"1,024 {name}: R@1 image→text" in capsys.readouterr().out
    model = AutoModel.from_pretrained(tmp_path / "out" / "clip_up")
    assert model.config.vision_config.moe_layers == [1] and model.config.vision_config.num_experts == 4
