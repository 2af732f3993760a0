"""What can be found in the symbol world: topics by clustering, kinds by style, and twins.

python -m benchmarks.symbol_world --model training/symbol_clip [--rows 10000]
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import adjusted_mutual_info_score

from benchmarks.page import Output, described, page, table
from data import symbols
from data.drawing import OPPOSITE
from data.symbol_kinds import TOPICS
from evaluation.embedder import Embedder, usable_device
from evaluation.linear_probe import linear_probe_metrics
from evaluation.sentence_encoders import TfidfEncoder
from evaluation.tasks import TASKS
from records.command_line import command
from training.clusters import balanced_kmeans, group_centers, kmeans, nearest_centers

CLUSTERS, EXPERTS, FINE_CENTERS = (2, 4, 15, 64), (2, 4), 64
STYLE = ("color", "size", "position", "background", "texture")


def topics_found(features: np.ndarray, topics: Sequence[str]) -> list[float]:
    """Adjusted mutual information of topics with clusters of the features (rows, d): K-means into `CLUSTERS`, and
    into `EXPERTS` by fine centers as MoDE does."""
    fine = balanced_kmeans(features, FINE_CENTERS, seed=0)[0]
    nearest = nearest_centers(features, torch.as_tensor(fine))
    labels = [kmeans(features, number, seed=0) for number in CLUSTERS]
    labels += [group_centers(fine, number, seed=0)[0][nearest] for number in EXPERTS]
    return [adjusted_mutual_info_score(topics, of_rows) for of_rows in labels]


def whole_topics(rows: Dataset) -> list[float | None]:
    """As `topics_found`, of clusters that hold whole topics."""
    kinds, topics = rows["kind"], rows["topic"]

    def of_sets(names: Sequence[str]) -> float:
        labels = [next(name for name in names if kind in symbols.KIND_SETS[name]) for kind in kinds]
        return adjusted_mutual_info_score(topics, labels)

    halves, quarters = (of_sets([n for n in symbols.KIND_SETS if n.startswith(part)]) for part in ("half", "quarter"))
    return [halves, quarters, of_sets(list(TOPICS)), None, halves, quarters]


def style_probe(train: Dataset, test: Dataset, column: str) -> float:
    """Accuracy of a linear probe that knows the style of pictures with one symbol and is asked for a column."""
    values = [(name, value) for name in STYLE for value in sorted(set(train[name]))]
    names = sorted(set(train[column]))
    features = [np.array([[row[n] == v for n, v in values] for row in rows], np.float32) for rows in (train, test)]
    labels = [[names.index(value) for value in rows[column]] for rows in (train, test)]
    return linear_probe_metrics(features[0], labels[0], features[1], labels[1])["accuracy"]


def best_recall(rows: Dataset) -> tuple[float, float]:
    """The best R@1, image to text and text to image, that a model can expect which cannot tell twins apart: pictures of
    the same scene, whichever of two symbols is the first. Equal captions of two pictures tie, which is a miss."""
    twins = defaultdict(list)
    for row in rows.remove_columns("image"):
        first = (row["kind"], row["color"], row["position"])
        second = (row["second_kind"], row["second_color"], OPPOSITE.get(row["position"], ""))
        seen = frozenset([first, second]) if row["second_kind"] else frozenset([first])
        twins[seen, row["size"], row["background"], row["texture"]].append(row["caption"])
    times = Counter(rows["caption"])
    # One of g twins is found: the choice of one is right once in g
    answered = sum(any(times[caption] == 1 for caption in captions) for captions in twins.values())
    return answered / len(rows), len(twins) / len(rows)


@command
def describe_world(*, model: str, rows: int = 10_000, output: Output = None) -> str:
    """What can be found in the symbol world: topics by clustering, kinds by style, and twins.

    Args:
        model: folder or hub name of a dense or sparse CLIP, whose features of the training pictures are clustered
        rows: training pictures that are clustered
    """
    embedder = Embedder(model, None, 64, usable_device(None))
    started = time.perf_counter()
    pictures = symbols.load("train", "web", rows)
    rate = rows / (time.perf_counter() - started)
    captions, topics = list(pictures["caption"]), list(pictures["topic"])
    encoders = {
        "TF-IDF": {"dim": 64},
        "TF-IDF, 16 dimensions, without words of more than 5 % of the captions": {"dim": 16, "max_df": 0.05},
    }
    agreement = {
        "whole topics": whole_topics(pictures),
        "the model's image features": topics_found(embedder.images(pictures), topics),
        "the model's text features": topics_found(embedder.texts(captions), topics),
    }
    for name, settings in encoders.items():
        agreement[name] = topics_found(TfidfEncoder.fit(captions, seed=0, **settings).encode(captions), topics)
    probe = TASKS["symbols_linear_probe"]
    (train, _), (test, _) = probe.load_train(), probe.load()
    retrieval = TASKS["symbols_retrieval"].load()[0]
    columns = [*(f"{n} clusters" for n in CLUSTERS), *(f"{n} of {FINE_CENTERS} centers" for n in EXPERTS)]
    shares = {
        "kind told by style alone": style_probe(train, test, "caption"),
        "topic told by style alone": style_probe(train, test, "topic"),
        f"best R@1 image→text of {len(retrieval):,} test pictures": best_recall(retrieval)[0],
        f"best R@1 text→image of {len(retrieval):,} test pictures": best_recall(retrieval)[1],
    }
    return page(
        output,
        "# The symbol world",
        "Topics found: adjusted mutual information of topics with clusters.",
        table(
            [f"{rows:,} training pictures", *columns],
            [[name, *("" if x is None else f"{x:.2f}" for x in numbers)] for name, numbers in agreement.items()],
        ),
        table(["", ""], [[name, f"{share:.1%}"] for name, share in shares.items()]),
        f"Style: {', '.join(STYLE)}; a linear probe on {len(train):,} training pictures of one symbol, tested on "
        f"{len(test):,}. Best R@1: expected of a model that cannot tell pictures of one scene apart. {rate:,.0f} "
        f"pictures drawn a second. {described()}.",
    )


if __name__ == "__main__":
    describe_world.main()
