"""Whether what two stages make goes together, as far as their settings and configurations tell."""

import os
from collections.abc import Sequence

from data.sources import is_saved
from data.worlds import WORLDS
from training.expected import Expected

# Settings of data that choose rows, wherever these are; of split sources; of a built-in world
ROWS, OF_SPLITS, OF_WORLDS = ("caption_column", "captions_per_line", "skip"), ("split",), ("captions", "kinds", "seed")


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
    # A file is all that it names, whatever the split is called
    split = source in WORLDS or (os.path.isdir(source) and not is_saved(source))
    keys = (*ROWS, *(OF_SPLITS if split else ()), *(OF_WORLDS if source in WORLDS else ()))
    found = [(key, getattr(theirs.data, key), getattr(ours.data, key)) for key in keys]
    if isinstance(theirs.pairs, int) and isinstance(ours.pairs, int):
        found.append(("the number of pairs", *(int(one.pairs) for one in (theirs, ours))))
    return [(key, then, now) for key, then, now in found if then != now]


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
    """The names of the parameters that training changed since two models were one. None where they may never have
    been, or that is not known."""
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
