"""README and docs: commands are read, examples run, links lead somewhere, numbers are those of the cards."""

import json
import re
import shutil
from itertools import groupby
from statistics import mean, stdev
from unittest import mock

import pytest
import stand_ins
from benchmark_folders import make_copy
from documents import (
    CLIP_MOE_DEMO,
    ELSEWHERE,
    PAGES,
    ROOT,
    RUN,
    SHOWN,
    blocks,
    few_symbols,
    lines,
    run_line,
    run_page,
    words,
)

import clip_moe
from clip_moe.app import settings_page
from clip_moe.conversion.own_classes import OPTION
from clip_moe.conversion.publishing import bundle
from clip_moe.engine.intervals import paired_interval
from clip_moe.engine.kinds import KINDS
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.stage_command import read_command
from clip_moe.engine.yaml_files import read_yaml
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS
from lab.law.cases import Case
from lab.law.fit import read_points
from lab.law.outcomes import points_of

TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
CARDS = ROOT / "model_cards"
# Column of a table here -> of a card's table of seeds
COLUMNS = {
    "zero-shot": "zero-shot: accuracy",
    "zero-shot, digits": "zero-shot, digits: accuracy",
    "15 topics": "zero-shot, 15 topics: mean accuracy",
    "6 topics seen": "zero-shot, 6 topics of half 1: mean accuracy",
    "9 topics unseen": "zero-shot, 9 topics of half 2: mean accuracy",
    "R@1 image→text": "retrieval: R@1 image→text",
    "R@1 text→image": "retrieval: R@1 text→image",
    "8 countries": "names, each country: mean accuracy",
    "attribute pairs": "attribute pairs: group score",
    "linear probe": "linear probe: accuracy",
}
WAYS = ("image→text", "text→image")
COLUMNS |= {f"{n} names: R@1 {way}": f"{n} names: R@1 {way}" for n in ("1,024", "2,048", "4,096") for way in WAYS}
COLUMNS |= {f"logos: {k} {way}": f"logos of brands: {k} {way}" for k in ("R@1", "R@5") for way in WAYS}


def name_of(page):
    return page.name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder in which everything lies that the pages name, and the CLIP-MoE of the symbols is made."""
    folder = tmp_path_factory.mktemp("docs") / "checkout"
    stand_ins.make_folder(folder)
    with few_symbols():
        with pytest.MonkeyPatch.context() as inside:
            inside.chdir(folder)
            clip_moe.main(["run", *CLIP_MOE_DEMO.split()])
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE and blocks(page)], ids=name_of)
def test_examples_run(page, checkout, hub, login, tmp_path, monkeypatch):
    """A page that names a repository of the Hub runs online and then offline."""
    if page.name != "publishing.md":  # the copy is tried in a process of its own, for seconds
        monkeypatch.setattr(bundle, "verify", lambda folder: None)
    for place in stand_ins.on_and_offline(hub, TEXT[page] if page.name != "publishing.md" else ""):
        shutil.copytree(checkout, tmp_path / place, symlinks=True)
        monkeypatch.chdir(tmp_path / place)
        run_page(page)
    if page.name == "publishing.md":
        assert "model.safetensors" in hub.files("user/clip-moe")


def commands_in_prose():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`(clip-moe [^`]+)`", prose):
            if any(name in command for name in stand_ins.ON_HUB):
                yield pytest.param(" ".join(command.split()), id=f"{page.name}-{command.split()[1]}")


@pytest.mark.slow
@pytest.mark.parametrize("command", list(commands_in_prose()))
def test_commands_in_prose_that_name_a_repository_run(command, hub, tmp_path, monkeypatch):
    benchmark = BENCHMARKS["imagenet1k"]
    make_copy(benchmark, benchmark.layouts[0], tmp_path / "imagenet1k")
    for place in stand_ins.on_and_offline(hub, command):
        if place == "online":
            hub.put(benchmark.hub, tmp_path / "imagenet1k", "datasets")
        stand_ins.make_folder(tmp_path / place)
        monkeypatch.chdir(tmp_path / place)
        if "runs/symbols/pictures" in command:
            run_line("clip-moe split runs/symbols/pictures --data.source my/photos --model training/symbol_clip")
        run_line(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_or_says_that_it_is_shown(page):
    """A block without a language would be in no test. A page that is tested elsewhere is named there."""
    assert {block.language for block in blocks(page)} <= {*RUN, *SHOWN}
    for block in blocks(page):
        assert not re.search(r"^(python -m|import |from \w+ import|stages:)", block.text, re.M) or block.language in RUN
        assert block.language != "yaml" or read_yaml(block.text, str(block))
    if page.name in ELSEWHERE:
        assert page.name in (ROOT / "tests" / ELSEWHERE[page.name]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_read(page, monkeypatch):
    """Kinds, settings and options of each command are there, and so are the targets of make and the extras of pip."""
    monkeypatch.chdir(ROOT)
    commands = [words(line) for block in blocks(page) if block.language == "bash" for line in lines(block)]
    for name, *arguments in commands:
        if name == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all(re.search(rf"^{word}:", makefile, re.M) for word in arguments if "=" not in word), arguments
        elif name == "pip":
            extras = re.findall(r"\[(\w+)\]", " ".join(arguments))
            assert all(f'"{extra}": {extra}' in (ROOT / "setup.py").read_text(encoding="utf-8") for extra in extras)
        elif name == "clip-moe" or arguments[:3] == ["launch", "-m", "clip_moe"]:
            read(arguments if name == "clip-moe" else arguments[3:])


def read(arguments):
    """What `clip-moe` does with its arguments before anything runs, and without classes of one's own."""
    if OPTION in arguments:
        place = arguments.index(OPTION)
        assert (ROOT / f"{arguments[place + 1].replace('.', '/')}.py").is_file()
        arguments = [*arguments[:place], *arguments[place + 2 :]]
    kind = arguments[0].replace("-", "_")
    if kind in KINDS:
        read_command(kind, arguments[1:])
        return
    parse = {"print_error": False, "exit_on_error": False}
    with mock.patch("clip_moe.engine.command_line.run", lambda line, given: line.parse_args(given, **parse)):
        clip_moe.main(arguments)
    if kind == "run" and arguments[2].startswith("training/"):
        options = dict(zip(arguments[1::2], arguments[2::2], strict=False))
        stages = {key: value for key, value in options.items() if "." in key}
        load_recipe(options["--config"], {key[2:]: read_yaml(value, key) for key, value in stages.items()})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for target, _, heading in re.findall(r"\]\((?!https?://)([^)#\s]*)(#([^)\s]+))?\)", TEXT[page]):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{target}#{heading}"


def test_the_front_page_is_short_and_leads_to_every_page():
    text = TEXT[ROOT / "README.md"]
    assert len(text.splitlines()) <= 130
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(re.findall(r"\]\(([^)#]+)", text))


def test_the_first_example_prints_what_stands_below_it(capsys):
    """Within the first 40 lines, on the model in the repository."""
    example, printed = blocks(ROOT / "README.md")[1:3]
    assert (example.language, printed.language) == ("python", "text") and example.line <= 40
    exec(compile(example.text, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed.text


def test_every_recipe_is_listed():
    recipes = {path.name for path in (ROOT / "training" / "recipes").glob("*.yaml")}
    cells = re.findall(r"^\| ([^|]+) \|", TEXT[ROOT / "docs" / "recipes.md"], re.MULTILINE)
    assert set(re.findall(r"`(\w+\.yaml)`", " ".join(cells))) == recipes


def test_the_index_of_papers_names_what_is_there():
    """Names in the second column stand in the file of that row, which may be "the same" as above."""
    path, checked = None, 0
    for cells in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", TEXT[ROOT / "docs" / "papers.md"], re.MULTILINE):
        linked = re.findall(r"\]\(([^)]+\.py)\)", cells[1])
        path = ROOT / "docs" / linked[0] if linked else path
        for name in re.findall(r"`(\w+)`", cells[1]):
            assert re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")), (cells[0], name)
            checked += 1
    assert checked > 20


def test_settings_are_those_of_the_code():
    """docs/settings.md is what `python -m clip_moe.app.settings_page` writes; each setting has a meaning."""
    assert settings_page.settings_page() == TEXT[settings_page.PAGE]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", TEXT[settings_page.PAGE], re.MULTILINE)
    assert len(rows) > 100 and [name for name, meaning in rows if not meaning] == []


# --- tables of scores


def tables(text):
    """(header, row, card) of every row of a table of scores; the card is the one that was linked last."""
    card = header = None
    for line in text.splitlines():
        linked = re.findall(r"model_cards/(\w+)/", line)
        card = linked[-1] if linked else card
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells if "model" in cells and set(cells) & set(COLUMNS) else []
        elif header and set(line) - set("|-"):
            yield header, dict(zip(header, cells, strict=True)), card


def card_scores(card):
    """Model -> column -> the cell of a card's table, or of one whose name it begins, without the difference to a
    baseline."""
    scores = {}
    for file in sorted(CARDS.glob(f"{card}*/seeds.md")):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            of_model = {column: without_difference(cells[name]) for column, name in COLUMNS.items() if name in cells}
            known = scores.setdefault(row[0], {})
            assert all(known.setdefault(column, score) == score for column, score in of_model.items()), (file, row[0])
    return scores


def without_difference(cell):
    return re.sub(r" ± 0\.0$", "", cell.split(" (")[0])


CARDS_OF = {
    "docs/results.md": "clip_up_names_long demo patch_dropout_names siglip_names clip_up_tables_names clip_up_icons "
    "sparse_methods_names router_teacher_names "
    "symbols_classes clip_moe_symbols clip_fmoe_symbols mode_symbols mode_names",
}


@pytest.mark.parametrize(("name", "cards"), CARDS_OF.items(), ids=CARDS_OF)
def test_scores_are_those_of_the_cards(name, cards):
    found = list(tables(TEXT[ROOT / name]))
    assert {card for _, _, card in found} == {*cards.split()}
    for header, row, card in found:
        expected = card_scores(card)[row["model"]]
        for column in header:
            if column in COLUMNS:
                assert without_difference(row[column].strip("*")) == expected[column], (card, row["model"], column)


def seed_scores(card, column, models):
    """Model -> its score in each seed, of the metric whose means a column has."""
    shown, of_seeds = card_scores(card), {}
    for file in sorted(CARDS.glob(f"{card}*/seeds.json")):
        for model, tasks in json.loads(file.read_text(encoding="utf-8")).items():
            for task, seeds in tasks.items():
                for metric in seeds[0] if model in models else ():
                    of_seeds.setdefault((task, metric), {})[model] = [100 * seed[metric] for seed in seeds]

    def cells(scores):
        return {model: without_difference(f"{mean(of):.1f} ± {stdev(of):.1f}") for model, of in scores.items()}

    expected = {model: shown[model][column] for model in models}
    return next(scores for scores in of_seeds.values() if cells(scores) == expected)


def best_cells(rows):
    """(model, column) -> whether its mean is above that of every other row by more than the paired interval over the
    seeds, widened for two columns."""
    (header, _, card), models = rows[0], [row["model"] for _, row, _ in rows]
    best = {}
    for column in set(header) & set(COLUMNS):
        scores = seed_scores(card, column, models)
        for model in models:
            others = [scores[other] for other in models if other != model]
            best[model, column] = all(paired_interval(scores[model], of, comparisons=2)[0] > 0 for of in others)
    return best


@pytest.mark.parametrize("name", CARDS_OF)
def test_the_best_scores_are_bold(name):
    for _, rows in groupby(tables(TEXT[ROOT / name]), key=lambda row: id(row[0])):
        rows = list(rows)
        for (model, column), is_best in best_cells(rows).items():
            (cell,) = [row[column] for _, row, _ in rows if row["model"] == model]
            assert cell.startswith("**") == cell.endswith("**") == is_best, (rows[0][2], model, column)


# --- the front page's table of gains and prices


def names(card, model, row):
    """R@1 of each seed, seconds, multiply-adds of use."""
    (tasks,) = json.loads((CARDS / card / "seeds.json").read_text(encoding="utf-8"))[model].values()
    recalls = [50 * (seed["image_to_text_recall@1"] + seed["text_to_image_recall@1"]) for seed in tasks]
    page = (ROOT / "lab" / "speed" / "results" / "names_training_cpu.md").read_text(encoding="utf-8")
    cells = next(line for line in page.splitlines() if line.startswith(f"| {row} ")).strip("|").split("|")
    return dict(enumerate(recalls)), float(cells[3]), int(cells[5].replace(",", ""))


def facts(*case, **more):
    points = points_of(Case(*case, **more), read_points(CARDS / "law/points.json", CARDS / "law/outcome_points.json"))
    recalls = {seed: 100 * point.recall for seed, point in points.items()}
    return recalls, mean(point.seconds for point in points.values()), next(iter(points.values())).multiply_adds


def gain(sparse, rival):
    seeds = sorted(sparse[0].keys() & rival[0].keys())
    scores = [[of[0][seed] for seed in seeds] for of in (sparse, rival)]
    low, high = paired_interval(*scores)
    return f"{mean(scores[0]) - mean(scores[1]):+.1f} ({low:.1f} to {high:.1f})"


def price_rows(task, *models):
    """A line for a sparse model and one for each of its rivals, each with its title."""
    titles, measured = models[::2], models[1::2]
    lines = []
    for title, (recalls, seconds, multiply_adds) in zip(titles, measured, strict=True):
        scores = f"{mean(recalls.values()):.1f} ± {stdev(recalls.values()):.1f}"
        use, over = multiply_adds / measured[0][2], gain(measured[0], (recalls, None)) if lines else ""
        lines.append(f"| {task} | {title} | {scores} | {len(recalls)} | {seconds:.0f} | {use:.2f} | {over} |")
        task = ""
    return lines


def test_the_four_arms_of_duplicates_are_those_of_the_cards():
    """A column for each of three seeds, and the differences with their intervals."""
    arms = json.loads((CARDS / "duplicates_order" / "seeds.json").read_text(encoding="utf-8"))
    long = json.loads((CARDS / "clip_up_names_long" / "seeds.json").read_text(encoding="utf-8"))
    arms |= {
        "together, negatives": long["dense, 30 wide, plain shuffles"],
        "apart, evenly spaced": long["dense, 30 wide"],
    }
    names = "together, negatives", "together, positives", "apart, random order", "apart, evenly spaced"
    scores = [[100 * seed["image_to_text_recall@1"] for seed in arms[arm]["names_4096"][:3]] for arm in names]
    expected = [f"| {arm} | {' | '.join(f'{x:.1f}' for x in row)} |" for arm, row in zip(names, scores, strict=True)]
    text = TEXT[ROOT / "docs" / "results.md"]
    assert "\n".join(expected) in text
    negatives, positives, random_order, even = scores
    for better, worse in ((even, random_order), (random_order, negatives), (positives, negatives)):
        low, high = paired_interval(better, worse)
        assert f"{mean(better) - mean(worse):+.1f} points ({low:.1f} to {high:.1f})" in " ".join(text.split())


def test_the_front_page_has_every_gain_beside_its_rivals_and_its_price():
    long, tables, strongest = "clip_up_names_long", "clip_up_tables_names", "strongest dense in fewer seconds"
    groups = [
        price_rows(
            "4,096 names",
            "**16 wide, 8 experts**",
            names(long, "CLIP-UP, 16 wide, 8 experts", "CLIP-UP, 16 wide, 8 experts"),
            "best dense of six, equal training: 30 wide",
            names(long, "dense, 30 wide", "dense, 30 wide"),
            f"{strongest}: 30 wide, trained longer",
            names(tables, "dense, 30 wide", "dense, 30 wide, longer"),
        ),
        price_rows(
            "4,096 names, less training",
            "**20 wide, 32 experts**",
            facts("names", 4096, 20, 640, experts=32, budget_width=16),
            "best dense of four, equal training: 20 wide",
            facts("names", 4096, 20, 640, budget_width=16),
            f"{strongest}: 32 wide",
            facts("names", 4096, 32, 400),
        ),
        price_rows(
            "2,048 logos",
            "**16 wide, 8 experts**",
            facts("icons", 2048, 16, 640, experts=8),
            "best dense of three, equal training, fewer seconds: 16 wide",
            facts("icons", 2048, 16, 640),
        ),
    ]
    text = TEXT[ROOT / "README.md"]
    expected = "\n".join(line for group in groups for line in group)
    assert expected in text, expected
    three = [
        facts("icons", 2048, width, 640, **more) for width, more in ((16, {"experts": 8}), (20, {"budget_width": 16}))
    ]
    for recalls, *_ in three:
        for seed in range(3, 9):
            del recalls[seed]
    assert gain(*three).lstrip("+") in " ".join(text.split())
