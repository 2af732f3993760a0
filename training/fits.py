"""Whether what two stages make goes together, as far as their settings and configurations tell."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from conversion.processors import model_configs, require_same
from data.sources import DataArguments
from data.splits import named_split
from data.worlds import WORLDS
from training.expected import Expected, Uncounted, Unknown

# Settings of data that choose rows, wherever these are; of a built-in world
ROWS, OF_WORLDS = ("caption_column", "captions_per_line", "skip"), ("captions", "kinds", "seed")


def other_rows(name: str, theirs: Expected, ours: Expected) -> str:
    """What tells that a stage is of other data than another stage, or nothing.

    Args:
        name: of the stage.
        theirs: what it makes, with a row for each of its pairs.
        ours: the data of the other stage.
    """
    if theirs.rows is None or theirs.rows.data is None or ours.data is None:
        return ""
    differing = [f"{key} is {then!r} there and {now!r} here" for key, then, now in _differences(theirs.rows, ours)]
    return f"{name} is of other data: {', '.join(differing)}. Use the same data in both" if differing else ""


def _differences(theirs: Expected, ours: Expected) -> list[tuple[str, object, object]]:
    source = ours.data.source
    if theirs.data.source != source:
        return [("source", theirs.data.source, source)] if {theirs.data.source, source} <= set(WORLDS) else []
    keys = (*ROWS, *(() if _same_split(theirs.data, ours.data) else ("split",)), *OF_WORLDS * (source in WORLDS))
    found = [(key, getattr(theirs.data, key), getattr(ours.data, key)) for key in keys]
    if not any(isinstance(one.pairs, str | Uncounted) for one in (theirs, ours)):
        found.append(("the number of pairs", *(int(one.pairs) for one in (theirs, ours))))
    return [(key, then, now) for key, then, now in found if then != now]


def _same_split(one: DataArguments, other: DataArguments) -> bool:
    """A dataset that was saved as one split has all its rows under any name that it takes."""
    named = {named_split(data.source, data.split) for data in (one, other)}
    return len(named) == 1 or (Path(one.source) / "state.json").is_file()


def read_otherwise(models: Iterable[Expected]) -> str:
    """Why models cannot become one that has one processor, as far as theirs are known, or nothing."""
    folders = dict.fromkeys(folder for model in models if model.processor and (folder := _processor(model)))
    try:
        require_same(list(folders) if len(folders) > 1 else [])
    except ValueError as error:
        return str(error)
    return ""


def _processor(model: Expected) -> Path | None:
    """The folder with the processor of a model; None where that is not known, or the model got longer texts since."""
    try:
        configs = model.clip, *model_configs(model.processor)
        lengths = {config.get_text_config().max_position_embeddings for config in configs}
    except (Unknown, ValueError, OSError):
        return None
    return model.processor if len(lengths) == 1 else None


def wrong_weights(weights: Sequence[float] | None, data: Expected) -> str:
    """Why the images of data have not as many captions as there are weights, or nothing."""
    if weights is None or data.captions in (None, "lists", len(weights)):
        return ""
    captions = "one caption, a text" if data.captions == "text" else f"{data.captions} captions"
    way_out = "leave them out, or make several with a captions stage" if data.captions == "text" else "give as many"
    return f"{len(weights)} weights, but the images of {data.data.source} have {captions}: {way_out}"


def too_many(number: int, of: int | None, what: str) -> str:
    """Why there cannot be so many clusters, or nothing."""
    return "" if of is None or number <= max(of, 1) else f"{of} {what} cannot make {number} clusters: ask for fewer"


def trained_apart(one: Expected, other: Expected) -> frozenset[str]:
    """Parameters trained since both models had the same weights; empty if that is not known."""
    both = zip(one.weights, other.weights, strict=False)
    shared = next((at for at, (a, b) in enumerate(both) if a != b), min(len(one.weights), len(other.weights)))
    since = (*one.weights[shared:], *other.weights[shared:]) if shared else ()
    return frozenset().union(*(names for _, names in since))


def other_encoder(name: str, one: Expected, other_name: str, other: Expected) -> str:
    """What tells that two stages go back to captions that different encoders embedded, or nothing."""
    if None in (one.encoder, other.encoder) or one.encoder == other.encoder:
        return ""
    return f"{name} goes back to the encoder {one.encoder}, {other_name} to {other.encoder}: name stages of one encoder"


def no_cluster(number: int | None, name: str, clusters: Expected) -> str:
    """Why there is no cluster of a number, or nothing."""
    if number is None or clusters.clusters is None or number < clusters.clusters:
        return ""
    return f"there is no cluster {number}: those of {name} are 0 to {clusters.clusters - 1}"
