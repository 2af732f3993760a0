"""The tasks on the worlds that this package draws. Their `load` and `load_train` take a seed of the pictures."""

from collections.abc import Callable, Mapping, Sequence

from datasets import Dataset

from clip_moe.data import names, symbols
from clip_moe.data.icons import ICONS
from clip_moe.data.names import NAMES
from clip_moe.data.world import World
from clip_moe.data.worlds import world
from clip_moe.evaluation.task import INFORMATION, PRIMARY_METRICS, RECALL_5, Task


def _symbol_kinds(split: str, num_samples: int, kinds: str = "all", seed: int = 0) -> Dataset:
    """Pictures of one symbol, with its kind."""
    rows = symbols.ONE.load(split, "detailed", num_samples, symbols.KIND_SETS[kinds], seed)
    return rows.remove_columns("caption").rename_column("kind", "caption")


def _symbol_zero_shot(
    number: int, title: str, protocol: str, kinds: str = "all", group_of_class: Mapping[str, str] | None = None
) -> Task:
    """Zero-shot classification of test pictures of one symbol; with groups, the mean of a task for each."""
    return Task(
        kind="zero_shot_groups" if group_of_class else "zero_shot",
        title=title,
        protocol=f"{number:,} test pictures of {protocol}, {len(symbols.TEMPLATES)} templates",
        load=lambda seed=0: (_symbol_kinds("test", number, kinds, seed), 0),
        classes=symbols.KIND_SETS[kinds],
        templates=symbols.TEMPLATES,
        group_of_class=group_of_class or {},
    )


def _symbol_topics(number: int, kinds: str) -> Task:
    """The mean of zero-shot tasks, of one topic each, as CLIP's benchmarks are tasks of one topic each."""
    suffix = "" if kinds == "all" else f" of {kinds}"
    topics = len({symbols.TOPIC_OF[kind] for kind in symbols.KIND_SETS[kinds]})
    protocol = f"one symbol{suffix}; a task for each of {topics} topics, its kinds are candidates"
    title = f"zero-shot, {topics} topics{suffix}"
    return _symbol_zero_shot(number, title, protocol, kinds, group_of_class=symbols.TOPIC_OF)


def symbol_tasks(number: int = 3000, retrieval: int = 5000, pairs: int = 1400, train: int = 6000) -> dict[str, Task]:
    """The tasks on symbols, with these numbers of samples."""
    all_kinds, digits = f"all {len(symbols.KINDS)} kinds are candidates", "all 10 are candidates"
    return {
        "symbols_zero_shot": _symbol_zero_shot(number, "zero-shot", f"one symbol; {all_kinds}"),
        "symbols_digits": _symbol_zero_shot(number, "zero-shot, digits", f"a digit; {digits}", "digit"),
        "symbols_topics": _symbol_topics(number, "all"),
        "symbols_topics_seen": _symbol_topics(number, "half 1"),
        "symbols_topics_unseen": _symbol_topics(number, "half 2"),
        "symbols_retrieval": Task(
            kind="retrieval",
            title="retrieval",
            protocol=f"{retrieval:,} test pictures of two symbols, one detailed caption each",
            load=lambda seed=0: (symbols.TWO.load("test", "detailed", retrieval, seed=seed), 0),
        ),
        "symbols_pairs": Task(
            kind="pairs",
            title="attribute pairs",
            protocol=f"{pairs:,} pairs of test pictures that differ in one of {len(symbols.DIFFERENCES)} things, "
            "detailed captions",
            load=lambda seed=0: (symbols.load_minimal_pairs("test", pairs, seed=seed), 0),
        ),
        "symbols_linear_probe": Task(
            kind="linear_probe",
            title="linear probe",
            protocol=f"{number:,} test pictures of one symbol of {len(symbols.KINDS)} kinds; logistic regression on "
            f"{train:,} training pictures",
            load=lambda seed=0: (_symbol_kinds("test", number, seed=seed), 0),
            load_train=lambda seed=0: (_symbol_kinds("train", train, seed=seed), 0),
            classes=symbols.KINDS,
        ),
    }


# Numbers of towns, and of brands, with a task
NUMBERS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BRANDS = (512, 1024, 2048)


def _one_of_each(drawn: World, kinds: str, captions: str = "web") -> Callable[[int], tuple[Dataset, int]]:
    """A function that loads a new picture of each of some kinds of a world, by the seed of the pictures."""

    def load(seed: int = 0) -> tuple[Dataset, int]:
        numbers = drawn.kinds(kinds)
        return drawn.load("test", captions, len(numbers), numbers, seed), 0

    return load


def name_tasks(towns: Sequence[int] = NUMBERS, fewer: int = 2048, num_country_towns: int = 4096) -> dict[str, Task]:
    """The tasks on names: which of all shields, and which of all names, belong together; and one for each country.

    Args:
        towns: how many, of a task of their own each.
        fewer: how many of whose halves some learn facts while the names of the others are kept.
        num_country_towns: how many whose names are told apart country by country.
    """
    rows = {f"names_{number}": (f"{number:,} names", str(number), "web", "name") for number in towns}
    rows["names_learned"] = "facts learned", f"{fewer} half 1", "facts", "facts"
    rows["names_kept"] = "names kept", f"{fewer} half 2", "web", "name"
    tasks = {
        name: Task(
            kind="retrieval",
            title=title,
            protocol=f"{len(NAMES.kinds(kinds))} new pictures of the shields of as many towns, with the town's "
            f"{caption}; all are candidates",
            load=_one_of_each(NAMES, kinds, captions),
            metrics=(*PRIMARY_METRICS["retrieval"], *INFORMATION),
        )
        for name, (title, kinds, captions, caption) in rows.items()
    }
    country_of = {names.name_of(town): names.country_of(town) for town in NAMES.kinds(str(num_country_towns))}
    tasks["names_countries"] = Task(
        kind="zero_shot_groups",
        title="names, each country",
        protocol=f"{num_country_towns} new pictures of the shields of as many towns; a task for each of "
        f"{len(names.COUNTRIES)} countries, its towns' names are candidates",
        load=_one_of_each(NAMES, str(num_country_towns)),
        classes=list(country_of),
        templates=["{}"],
        group_of_class=country_of,
    )
    return tasks


def _world_retrieval(drawn: World, kinds: str, title: str, protocol: str) -> Task:
    return Task("retrieval", title, protocol, _one_of_each(drawn, kinds), metrics=[*RECALL_5, *INFORMATION])


def icon_tasks() -> dict[str, Task]:
    """The tasks on icons, which their extra has to be installed for."""
    others = "icons whose names are also those of another artist's icons, which alone are among all, with the name"
    rows = {
        "icons_brands": ("logos of brands", "brands", "every brand's logo, with the brand's name"),
        "icons_all": ("icons", "all", "an icon of every name, with the name"),
        "icons_other_artists": ("icons of other artists", "other artists", others),
    }
    for number in BRANDS:
        shown = f"the logos of {number:,} brands, with the brand's name"
        rows[f"icons_{number}"] = f"{number:,} logos", f"brands {number}", shown
    return {
        name: _world_retrieval(ICONS, kinds, title, f"a new picture of {shown}; all are candidates")
        for name, (title, kinds, shown) in rows.items()
    }


def world_task(name: str) -> tuple[str, Task]:
    """A task on any world, spelled `package.module:OBJECT KINDS`, and its name in results: `WORLD_KINDS`."""
    source, _, kinds = name.partition(" ")
    drawn = world(source)
    number = len(drawn.kinds(kinds))  # raises where there are none
    title = f"{number:,} {drawn.name}" if kinds.isdecimal() else f"{drawn.name}, {kinds}"
    protocol = f"a new picture of each of {title}, {drawn.tested_as}; all of these are candidates"
    return f"{drawn.name}_{kinds.replace(' ', '_')}", _world_retrieval(drawn, kinds, title, protocol)
