"""The tables of docs/results.md and of the front page, from the committed results.

    python -m lab.cards.findings

writes their rows below their headers. A gain is the mean difference over the seeds, in points of R@1, with its paired
95 % interval.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev

from clip_moe.engine.command_line import command
from clip_moe.engine.recipe import load_recipe
from clip_moe.training.stages.steps import StepsStage
from lab import ROOT, recipe_file
from lab.cards.intervals import paired_interval
from lab.law.cases import Case, costs
from lab.law.fit import read_points
from lab.law.outcomes import points_of
from lab.law.points import Point

CARDS = ROOT / "model_cards"
NARROW = CARDS / "law" / "narrow_points.json"
CLOCK = (ROOT / "lab" / "speed" / "results" / "names_clock_cpu.md").read_text(encoding="utf-8")
LONG, TABLES, SIGLIP = "clip_up_names_long", "clip_up_tables_names", "siglip_names"
EQUAL = "dense, same multiply-adds"

Recalls = Mapping[int, float]  # seed -> R@1 in percent, the mean of both directions
Price = tuple[Recalls, float | None, int]  # with seconds of training and multiply-adds of a picture and a text


def recall_of_seeds(card: str, model: str) -> Recalls:
    """The only retrieval task of a card."""
    tasks = json.loads((CARDS / card / "seeds.json").read_text(encoding="utf-8"))[model]
    (results,) = (results for task, results in tasks.items() if task != "names_countries")
    recalls = [50 * (result["image_to_text_recall@1"] + result["text_to_image_recall@1"]) for result in results]
    return dict(enumerate(recalls))


def points(*case, **more) -> Mapping[int, Point]:
    files = CARDS / "law" / "points.json", CARDS / "law" / "outcome_points.json", NARROW
    return points_of(Case(*case, **more), read_points(*files))


def recall_of_case(*case, **more) -> Recalls:
    return {seed: 100 * point.recall for seed, point in points(*case, **more).items()}


def seconds_of(row: str, seed_steps: int, steps: int) -> float:
    """Of training, by the milliseconds of a step in the page of the clock."""
    cells = next(line for line in CLOCK.splitlines() if line.startswith(f"| {row} ")).strip("|").split("|")
    return (seed_steps * float(cells[1]) + steps * float(cells[2])) / 1000


def score(recalls: Recalls) -> str:
    spread = f" ± {stdev(recalls.values()):.1f}" if len(recalls) > 1 else ""
    return f"{mean(recalls.values()):.1f}{spread}"


def gain(recalls: Recalls, rival: Recalls) -> str:
    seeds = sorted(recalls.keys() & rival.keys())
    ours, theirs = ([scores[seed] for seed in seeds] for scores in (recalls, rival))
    difference = f"{mean(ours) - mean(theirs):+.1f}"
    if len(seeds) == 1:
        return difference
    low, high = paired_interval(ours, theirs)
    return f"{difference} ({low:.1f} to {high:.1f})"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def pair_row(title: str, sparse: Recalls, dense: Recalls, *more: str) -> str:
    return row(title, *more, score(dense), score(sparse), gain(sparse, dense), len(sparse.keys() & dense.keys()))


def room() -> Iterator[str]:
    dense, sparse = "dense, 16 wide", "CLIP-UP, 16 wide, 8 experts"
    for number, bits, card in ((256, "0.10", "clip_up_names_256"), (1024, "0.55", "clip_up_names_1024")):
        yield pair_row(f"{number:,}", recall_of_seeds(card, sparse), recall_of_seeds(card, dense), bits)
    yield pair_row("2,048", recall_of_seeds("demo", "CLIP-UP, 8 experts"), recall_of_seeds("demo", EQUAL), "1.2")
    yield pair_row("4,096", recall_of_seeds(LONG, sparse), recall_of_seeds(LONG, dense), "2.8")


def shapes() -> Iterator[str]:
    sparse = recall_of_seeds(LONG, "CLIP-UP, 16 wide, 8 experts")
    for model in ("dense, 16 wide", "dense, 16 wide, wider FFNs", "dense, 26 wide", "dense, 30 wide"):
        rival = recall_of_seeds(LONG, model)
        yield row(model, score(rival), gain(sparse, rival))
    longer = recall_of_seeds(TABLES, "dense, 30 wide")
    yield row("dense, 30 wide, trained longer: fewer seconds", score(longer), gain(sparse, longer))


def real_pictures() -> Iterator[str]:
    card = "clip_up_icons"
    yield pair_row("3,369 logos, 16 wide", recall_of_seeds(card, "CLIP-UP, 8 experts"), recall_of_seeds(card, EQUAL))
    for world, number, width, exposures in (
        ("icons", 2048, 16, 640),
        ("icons", 2048, 24, 320),
        ("icons", 1024, 16, 1280),
        ("icons", 512, 12, 640),
        ("icons", 512, 24, 320),
        ("icons", 512, 32, 640),
        ("characters", 2048, 24, 320),
        ("characters", 1024, 24, 320),
        ("characters", 512, 24, 320),
        ("characters", 512, 32, 640),
        ("molecules", 512, 32, 640),
        ("molecules", 512, 24, 640),
    ):
        sparse, dense = (recall_of_case(world, number, width, exposures, experts=experts) for experts in (8, 0))
        pictures = "logos" if world == "icons" else world
        yield pair_row(f"{number:,} {pictures}, {width} wide, {exposures:,} exposures", sparse, dense)


def sigmoid_loss() -> Iterator[str]:
    dense = recall_of_seeds(SIGLIP, EQUAL)
    for experts in (8, 32):
        yield pair_row(f"{experts} experts", recall_of_seeds(SIGLIP, f"CLIP-UP, {experts} experts"), dense)


def capacity() -> Iterator[str]:
    dense = recall_of_seeds(TABLES, f"separated, {EQUAL}")
    for model, title in {
        "separated, upcycled": "2 in both towers, as in the paper",
        "image capacity 4": "4 for images, 2 for texts",
        "no capacity": "none",
        "no capacity, scratch, same multiply-adds": "none, from scratch",
    }.items():
        recalls = recall_of_seeds(TABLES, model)
        yield row(title, score(recalls), gain(recalls, dense))


def recalls_of_arms() -> Mapping[str, list[float]]:
    """Arm -> R@1 from image to text in each of three seeds, of a dense model 30 wide."""
    arms = json.loads((CARDS / "duplicates_order" / "seeds.json").read_text(encoding="utf-8"))
    long = json.loads((CARDS / LONG / "seeds.json").read_text(encoding="utf-8"))
    arms["together, negatives"] = long["dense, 30 wide, plain shuffles"]
    arms["apart, evenly spaced"] = long["dense, 30 wide"]
    names = "together, negatives", "together, positives", "apart, random order", "apart, evenly spaced"
    return {arm: [100 * seed["image_to_text_recall@1"] for seed in arms[arm]["names_4096"][:3]] for arm in names}


def duplicates() -> Iterator[str]:
    return (row(arm, *(f"{recall:.1f}" for recall in recalls)) for arm, recalls in recalls_of_arms().items())


def methods() -> Iterator[str]:
    names, icons, again = "router_teacher_names", "router_teacher_icons", "sparse_methods_again"
    for model, card, has_logos in (
        ("dense teacher of routers", names, True),
        ("dense teacher of routers, biases", names, True),
        ("biases, no balance loss", names, True),
        ("no biases, no balance loss", names, False),
        ("experts of clusters", again, False),
        ("16 experts from 8", again, False),
    ):
        logos = gain(recall_of_seeds(icons, model), recall_of_seeds(icons, "CLIP-UP")) if has_logos else "not run"
        recalls = recall_of_seeds(card, model)
        yield row(model, gain(recalls, recall_of_seeds(card, "CLIP-UP")), len(recalls), logos)


def kept() -> Iterator[str]:
    """Learned, kept, and above the line of dense models, from the card's trade-off."""
    titles = {"base": "nothing: the base", "dense, 100 %": "all weights, dense", "CLIP-UP, 100 %": "CLIP-UP"}
    titles |= {name: name for name in ("CLIP-MoE", "CLIP-FMoE", "MoDE")}
    for line in (CARDS / "symbols_kept" / "tradeoff.md").read_text(encoding="utf-8").splitlines():
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if title in titles:
            yield row(titles[title], *cells[:3])


# Row of the card at the dense model's price -> the stage that trained it
PARTS = {
    "dense": "dense",
    "dense, half the rate": "dense_half_rate",
    "dense, twice the rate": "dense_double_rate",
    "dense, 16 wide": "dense_16",
    "dense, 20 wide": "dense_20",
    "CLIP-UP": "clip_up",
    "1 of 8, sigmoid": "one",
    "2 of 16 halves": "halves",
    "4 of 32 quarters": "quarters",
    "4 of 64 quarters": "quarters_64",
    "4 of 128 quarters": "quarters_128",
    "3 of 30 quarters, 1 shared": "shared_30",
    "3 of 31 quarters, 1 shared": "shared_31",
    "quarters, sigmoid": "sigmoid",
    "quarters, sigmoid, biases by sign": "by_sign",
    "quarters, sigmoid, biases by z-score": "by_z_score",
    "quarters, images alone": "images",
    "moe_vie, images alone": "moe_vie",
}


def dense_price() -> Iterator[str]:
    """Steps are those of equal multiply-adds, so that their inverse is the price of use."""
    stages = load_recipe(recipe_file("dense_price_worlds")).stages
    steps = {stage.name: stage.max_steps for stage in stages if isinstance(stage, StepsStage)}
    dense, clip_up = (recall_of_seeds("dense_price_names", model) for model in ("dense", "CLIP-UP"))
    for model, stage in PARTS.items():
        recalls = recall_of_seeds("dense_price_names", model)
        gains = ["" if rival is recalls or rival == recalls else gain(recalls, rival) for rival in (dense, clip_up)]
        yield row(model, f"{steps['dense'] / steps[stage]:.2f}", score(recalls), *gains)


# Experts, those of a token, and how many make an FFN
SPARSE = {"CLIP-UP": (8, 2, 1), "2 of 16 halves": (16, 2, 2), "4 of 32 quarters": (32, 4, 4)}
Used = tuple[Recalls, int]  # with multiply-adds of a picture and a text


def of_case(*case, **more) -> Used:
    return recall_of_case(*case, **more), next(iter(points(*case, **more).values())).multiply_adds


def sparse_of_case(*case) -> dict[str, Used]:
    names = ("experts", "experts_per_token", "parts")
    return {name: of_case(*case, **dict(zip(names, kind, strict=True))) for name, kind in SPARSE.items()}


def points_of_names(batch_size: int, width: int, kind: tuple[int, int, int], factor: float = 1) -> list[Point]:
    """Runs of names_clock.yaml, seed by seed, at a multiple of the rate 0.256 / width."""
    return [
        point
        for point in read_points(NARROW)
        if (point.facts, point.batch_size, point.width) == (4096, batch_size, width)
        and (point.experts, point.experts_per_token, point.parts) == kind
        and round(point.rate * width / 0.256, 1) == round(factor, 1)
    ]


def of_names(*model) -> Used:
    run = points_of_names(*model)
    return {point.seed: 100 * point.recall for point in run}, run[0].multiply_adds


def use_of_long(initialized: str, *kind: int) -> int:
    """Multiply-adds of a picture and a text for a model of clip_up_names_long.yaml."""
    stages = {stage.name: stage for stage in load_recipe(recipe_file(LONG)).stages}
    tower, length = stages[initialized].vision_config, stages[initialized].text_config["max_position_embeddings"]
    width, ffn = tower["hidden_size"], tower["intermediate_size"]
    return costs("names", width, *(kind or (0, 2, 1)), length=length, ffn=ffn)[0]


def dense_price_worlds() -> Iterator[str]:
    """In each world the dense models, CLIP-UP and narrow experts, all of equal multiply-adds in training; their gains
    over the best dense one and over CLIP-UP."""
    dense, clip_up, *narrow = (recall_of_seeds("dense_price_names", row) for row in ("dense", *SPARSE))
    first = {"dense": dense, "CLIP-UP": clip_up, **dict(zip(list(SPARSE)[1:], narrow, strict=True))}
    counted = [costs("names", 12, *kind)[0] for kind in ((0, 2, 1), *SPARSE.values())]
    logos, names = ("icons", 2048, 16, 640), ("names", 1024, 24, 240)
    wide = {f"dense, {width} wide": of_case("names", 1024, width, 240, budget_width=24) for width in (16, 20)}
    wide_logos = {f"dense, {width} wide": of_case("icons", 2048, width, 640, budget_width=16) for width in (20, 24)}
    long = {model: recall_of_seeds(LONG, model) for model in ("dense, 30 wide", "CLIP-UP, 16 wide, 8 experts")}
    worlds = {
        "1,024 names, 12 wide": {
            name: (recalls, use) for (name, recalls), use in zip(first.items(), counted, strict=True)
        },
        "1,024 names, 24 wide": {"dense": of_case(*names), **wide, **sparse_of_case(*names)},
        "2,048 logos, 16 wide": {"dense": of_case(*logos), **wide_logos, **sparse_of_case(*logos)},
        "4,096 names, 16 wide": {
            "dense": (recall_of_seeds(LONG, "dense, 16 wide"), use_of_long("initialized")),
            "dense, 30 wide": (long["dense, 30 wide"], use_of_long("initialized_30")),
            "CLIP-UP": (long["CLIP-UP, 16 wide, 8 experts"], use_of_long("initialized", *SPARSE["CLIP-UP"])),
            **{name: of_names(1024, 16, SPARSE[name]) for name in ("2 of 16 halves", "4 of 32 quarters")},
        },
    }
    for world, models in worlds.items():
        best = max((used[0] for name, used in models.items() if "dense" in name), key=lambda r: mean(r.values()))
        for number, (name, (recalls, use)) in enumerate(models.items()):
            gains = ["" if recalls is rival else gain(recalls, rival) for rival in (best, models["CLIP-UP"][0])]
            price = f"{use / models['dense'][1]:.2f}"
            yield row("" if number else world, name, price, score(recalls), len(recalls), *gains)


def by_the_clock() -> Iterator[str]:
    """Equal seconds of one core, batches of 512. Run 0 has chosen two models of each side for fresh seeds."""
    dense = {f"dense, {width} wide": (width, (0, 0, 1)) for width in (24, 30, 36, 44)}
    sparse = {f"{name}, {width} wide": (width, kind) for width in (16, 36) for name, kind in SPARSE.items()}
    sparse["2 of 16 halves, 24 wide"] = 24, SPARSE["2 of 16 halves"]
    models = {name: of_names(512, width, kind) for name, (width, kind) in {**dense, **sparse}.items()}
    fresh = {name: {seed: recall for seed, recall in recalls.items() if seed} for name, (recalls, _) in models.items()}
    best, best_use = "dense, 44 wide", models["dense, 44 wide"][1]
    for name, (recalls, use) in models.items():
        cells = ["", "", ""]
        if fresh[name]:
            cells = [score(fresh[name]), len(fresh[name]), "" if name == best else gain(fresh[name], fresh[best])]
        yield row(name, f"{use / best_use:.2f}", f"{recalls[0]:.1f}", *cells)


def other_rates() -> Iterator[str]:
    """Run 0 of the best models by the clock, and of a wider one."""
    dense = {f"dense, {width} wide": (width, (0, 0, 1)) for width in (36, 44, 52)}
    sparse = {f"{name}, 36 wide": (36, SPARSE[name]) for name in ("CLIP-UP", "2 of 16 halves")}
    for title, (width, kind) in {**dense, **sparse}.items():
        runs = (points_of_names(512, width, kind, factor) for factor in (2 / 3, 1, 3 / 2))
        yield row(title, *("" if not run else f"{100 * run[0].recall:.1f}" for run in runs))


def prices(task: str, models: Mapping[str, Price]) -> Iterator[str]:
    """Rows of a sparse model, which comes first, and of its rivals."""
    sparse, _, sparse_use = next(iter(models.values()))
    for number, (title, (recalls, seconds, use)) in enumerate(models.items()):
        price = "" if seconds is None else f"{seconds:.0f}", f"{use / sparse_use:.2f}"
        cells = score(recalls), len(recalls), *price, gain(sparse, recalls) if number else ""
        yield row("" if number else task, title, *cells)


def front_page() -> Iterator[str]:
    """Narrow experts beside CLIP-UP and the best dense models: of equal training, and of equal seconds."""
    quarters, clip_up = (f"{name}, 1024 pairs" for name in ("4 of 32 quarters", "CLIP-UP"))
    narrow, narrow_use = of_names(1024, 16, SPARSE["4 of 32 quarters"])
    whole, dense = (recall_of_seeds(LONG, model) for model in ("CLIP-UP, 16 wide, 8 experts", "dense, 30 wide"))
    stages = load_recipe(recipe_file(LONG)).stages
    steps = {stage.name: stage.max_steps for stage in stages if isinstance(stage, StepsStage)}
    run = points_of_names(1024, 16, SPARSE["4 of 32 quarters"])[0]
    narrow_steps = run.pairs // run.batch_size - steps["seed_model"]
    yield from prices(
        "4,096 names",
        {
            "**16 wide, 4 of 32 quarters**": (
                narrow,
                seconds_of(quarters, steps["seed_model"], narrow_steps),
                narrow_use,
            ),
            "16 wide, CLIP-UP, 8 experts": (
                whole,
                seconds_of(clip_up, steps["seed_model"], steps["clip_up_8"]),
                use_of_long("initialized", *SPARSE["CLIP-UP"]),
            ),
            "best dense of six, equal training: 30 wide": (
                dense,
                seconds_of("dense, 30 wide, 1024 pairs", steps["seed_30"], steps["dense_30"]),
                use_of_long("initialized_30"),
            ),
        },
    )
    clock = {}
    for title, width, kind in (
        ("**36 wide, 2 of 16 halves**", 36, SPARSE["2 of 16 halves"]),
        ("best dense of four, equal seconds: 44 wide", 44, (0, 0, 1)),
        ("dense, 36 wide", 36, (0, 0, 1)),
    ):
        recalls, use = of_names(512, width, kind)
        fresh = {seed: recall for seed, recall in recalls.items() if seed}
        clock[title] = fresh, float(re.search(r"All train for (\d+) s", CLOCK)[1]), use
    yield from prices("the same", clock)
    logos = ("icons", 2048, 16, 640)
    sparse = sparse_of_case(*logos)
    untimed = {
        "**16 wide, 4 of 32 quarters**": sparse["4 of 32 quarters"],
        "16 wide, CLIP-UP, 8 experts": sparse["CLIP-UP"],
        "best dense of three, equal training: 16 wide": of_case(*logos),
    }
    yield from prices("2,048 logos", {title: (recalls, None, use) for title, (recalls, use) in untimed.items()})


FRONT_PAGE, RESULTS, LAB = ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "lab" / "results" / "README.md"
# Page and header of a table -> its rows
FINDINGS = {
    (FRONT_PAGE, "| task | model |"): front_page,
    (RESULTS, "| names |"): room,
    (RESULTS, "| model | R@1 | gain of 8 experts |"): shapes,
    (RESULTS, "| pictures |"): real_pictures,
    (RESULTS, "| CLIP-UP with |"): sigmoid_loss,
    (RESULTS, "| capacity |"): capacity,
    (RESULTS, "| equal names of a batch |"): duplicates,
    (RESULTS, "| method |"): methods,
    (RESULTS, "| trained on the symbols |"): kept,
    (RESULTS, "| world | experts |"): dense_price_worlds,
    (RESULTS, "| model, equal seconds |"): by_the_clock,
    (LAB, "| experts, 12 wide |"): dense_price,
    (LAB, "| model, run 0 |"): other_rates,
}


def written(path: Path) -> str:
    """The page with the rows of its tables as the results have them."""
    text = path.read_text(encoding="utf-8")
    for (page, header), rows in FINDINGS.items():
        if page == path:
            before, found, table = text.partition(f"\n{header}")
            if not found:
                raise ValueError(f"{path} has no table {header}")
            head, _, rest = table.partition("|\n|---")
            ruler, _, rest = rest.partition("\n")
            _, end, after = rest.partition("\n\n")
            text = f"{before}{found}{head}|\n|---{ruler}\n" + "\n".join(rows()) + end + after
    return text


@command
def write_findings() -> None:
    """Write the rows of all tables."""
    for path in (FRONT_PAGE, RESULTS, LAB):
        path.write_text(written(path), encoding="utf-8")


if __name__ == "__main__":
    write_findings.main()
