"""README and docs: commands are read, examples run, links lead somewhere."""

import re
import shutil

import pytest
import stand_ins
from benchmark_folders import make_copy
from documents import ELSEWHERE, PAGES, ROOT, RUN, SHOWN, blocks, few_symbols, lines, run_line, run_page, words

from clip_moe.app import settings_page
from clip_moe.engine.yaml_files import read_yaml
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS

TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
CARDS = ROOT / "model_cards"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with everything that the pages name."""
    folder = tmp_path_factory.mktemp("docs") / "checkout"
    stand_ins.make_folder(folder)
    with few_symbols():
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE and blocks(page)], ids=lambda page: page.name
)
def test_examples_run(page, checkout, hub, login, tmp_path, monkeypatch, request):
    """A page that names a repository of the Hub runs online and then offline."""
    if page.name != "publishing.md":
        request.getfixturevalue("unverified")
    code = "".join(block.text for block in blocks(page))
    for place in stand_ins.on_and_offline(hub, code if page.name != "publishing.md" else ""):
        shutil.copytree(checkout, tmp_path / place, symlinks=True)
        monkeypatch.chdir(tmp_path / place)
        run_page(page)
    if page.name == "publishing.md":
        assert "model.safetensors" in hub.files("user/clip-moe")


def commands_in_prose():
    """Each once, with the most options that a page gives it."""
    commands = {}
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`(clip-moe [^`]+)`", prose):
            if any(name in command for name in stand_ins.ON_HUB):
                commands[" ".join(command.split())] = f"{page.name}-{command.split()[1]}"
    for command, name in commands.items():
        if not any(other.startswith(f"{command} ") for other in commands):
            yield pytest.param(command, id=name)


@pytest.mark.slow
@pytest.mark.parametrize("command", list(commands_in_prose()))
def test_commands_in_prose_that_name_a_repository_run(command, hub, tmp_path, monkeypatch):
    make_copy("imagenet1k", tmp_path / "imagenet1k")
    for place in stand_ins.on_and_offline(hub, command):
        if place == "online":
            hub.put(BENCHMARKS["imagenet1k"].hub, tmp_path / "imagenet1k", "datasets")
        stand_ins.make_folder(tmp_path / place)
        monkeypatch.chdir(tmp_path / place)
        if "runs/symbols/pictures" in command:
            run_line("clip-moe split runs/symbols/pictures --data.source my/photos --model training/symbol_clip")
        run_line(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_says_that_it_is_shown(page):
    """A block without a language would be in no test. A page that is tested elsewhere is named there."""
    assert {block.language for block in blocks(page)} <= {*RUN, *SHOWN}
    for block in blocks(page):
        assert not re.search(r"^(python -m|import |from \w+ import|stages:)", block.text, re.M) or block.language in RUN
        assert block.language != "yaml" or read_yaml(block.text, str(block))
    if page.name in ELSEWHERE:
        assert page.name in (ROOT / "tests" / ELSEWHERE[page.name]).read_text(encoding="utf-8")


def test_targets_of_make_and_extras_of_pip_are_there():
    """Other commands run, with these in no test."""
    files = [(ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "setup.py")]
    found = [block for page in PAGES for block in blocks(page) if block.language == "bash"]
    for name, *arguments in (words(line) for block in found for line in lines(block)):
        if name == "make":
            assert all(re.search(rf"^{word}:", files[0], re.M) for word in arguments if "=" not in word), arguments
        elif name == "pip":
            assert all(f'"{extra}": {extra}' in files[1] for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)))


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("lab/**/*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files_and_headings(page):
    text = page.read_text(encoding="utf-8")
    for target, _, heading in re.findall(r"\]\((?!https?://)([^)#\s]*)(#([^)\s]+))?\)", text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{target}#{heading}"


def test_pages_are_short_and_the_front_page_leads_to_all():
    text = TEXT[ROOT / "README.md"]
    assert len(text.splitlines()) <= 130
    assert [page.name for page in PAGES if len(TEXT[page].splitlines()) > 200] == ["settings.md"]
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(re.findall(r"\]\(([^)#]+)", text))


def test_the_first_example_prints_what_stands_below_it(capsys):
    """Within the first 40 lines, on the model in the repository."""
    example, printed = blocks(ROOT / "README.md")[2:4]
    assert (example.language, printed.language) == ("python", "text") and example.line <= 40
    exec(compile(example.text, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed.text


@pytest.mark.parametrize(("folder", "page"), [("training", "docs/recipes.md"), ("lab", "lab/README.md")])
def test_every_recipe_is_listed(folder, page):
    recipes = {path.name for path in (ROOT / folder / "recipes").glob("*.yaml")}
    cells = re.findall(r"^\| ([^|]+) \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"[`[](\w+\.yaml)[]`]", " ".join(cells))) == recipes


def test_the_index_of_papers_names_what_is_there():
    """Names in the second column stand in a file of that row, which may be "the same" as above."""
    text, checked = "", 0
    for cells in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", TEXT[ROOT / "docs" / "papers.md"], re.MULTILINE):
        linked = re.findall(r"\]\(([^)]+\.py)\)", cells[1])
        text = "".join((ROOT / "docs" / file).read_text(encoding="utf-8") for file in linked) or text
        for name in re.findall(r"`(\w+)`", cells[1]):
            assert re.search(rf"\b{name}\b", text), (cells[0], name)
            checked += 1
    assert checked > 20


def test_settings_are_those_of_the_code():
    """docs/settings.md is what `python -m clip_moe.app.settings_page` writes; each setting has a meaning."""
    assert settings_page.settings_page() == TEXT[settings_page.PAGE]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", TEXT[settings_page.PAGE], re.MULTILINE)
    assert len(rows) > 100 and [name for name, meaning in rows if not meaning] == []
