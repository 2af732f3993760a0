"""K-means of features: by scikit-learn where they are few, by faiss where they are millions."""

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

Library = Literal["scikit-learn", "faiss"]
# More features than these are many: faiss computes, and starts once
MANY = 100_000
# Features that faiss learns centers from: of each cluster as many as faiss by itself takes, but more of few clusters
SAMPLES_PER_CLUSTER, FEWEST_SAMPLES = 256, 65_536
# Features that are looked at together: more do not stay in the cache
CHUNK = 4096
INSTALL_FAISS = "faiss is not installed: pip install faiss-cpu (or clip-moe[faiss])"


@dataclass(frozen=True)
class Method:
    """How K-means is computed.

    Args:
        n_init: starts, of which the best counts.
        num_samples: of faiss, features that the centers are learned from; None: see `samples`.
    """

    library: Library = "scikit-learn"
    n_init: int = 10
    num_samples: int | None = None

    def samples(self, num_clusters: int) -> int:
        """The most features that faiss learns centers from."""
        return self.num_samples or max(FEWEST_SAMPLES, SAMPLES_PER_CLUSTER * num_clusters)

    def __str__(self) -> str:
        if self.library == "scikit-learn":
            return f"scikit-learn, n_init {self.n_init}"
        faiss = import_faiss()
        samples = self.num_samples or f"{SAMPLES_PER_CLUSTER} a cluster and at least {FEWEST_SAMPLES}"
        threads = faiss.omp_get_max_threads()
        return f"faiss {faiss.__version__}, n_init {self.n_init}, num_samples {samples}, threads {threads}"


TEN_STARTS = Method()


def choose_method(
    num_features: int, library: Library | None = None, n_init: int | None = None, num_samples: int | None = None
) -> Method:
    """What is not given, by the number of features: ten starts of scikit-learn's up to `MANY`, else one of faiss's."""
    many = num_features > MANY
    return Method(library or ("faiss" if many else "scikit-learn"), n_init or (1 if many else 10), num_samples)


def kmeans(
    features: np.ndarray,
    num_clusters: int,
    seed: int,
    what: str = "features",
    method: Method = TEN_STARTS,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """K-means, repeatable to the bit: scikit-learn's on one thread, faiss's with as many threads as before.

    scikit-learn holds all features twice. faiss (25 iterations from random features) learns its centers from a sample;
    then each feature goes to the nearest center, a chunk at a time, so that features may be mapped from a file.

    Args:
        features: (samples, D), float32 where they are many.
        what: they are, for error messages.
        rows: numbers of the features to cluster, ascending; None: all.

    Returns:
        (rows,) labels from 0 to `num_clusters` - 1. None is empty.

    Raises:
        ValueError: fewer samples than clusters, features that are not finite, or fewer different ones than clusters;
            faiss is not installed.
    """
    rows = np.arange(len(features)) if rows is None else rows
    if len(rows) < num_clusters:
        raise ValueError(f"{len(rows)} samples cannot make {num_clusters} clusters of {what}")
    compute = _by_faiss if method.library == "faiss" else _by_scikit_learn
    labels = compute(features, rows, num_clusters, seed, what, method)
    _require_clusters(len(np.unique(labels)), num_clusters, len(rows), what)
    return labels


def _by_scikit_learn(
    features: np.ndarray, rows: np.ndarray, num_clusters: int, seed: int, what: str, method: Method
) -> np.ndarray:
    features = features[rows]
    _require_finite(features, what)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different features than clusters: the caller's
        return KMeans(num_clusters, n_init=method.n_init, random_state=seed).fit_predict(features)


def _by_faiss(
    features: np.ndarray, rows: np.ndarray, num_clusters: int, seed: int, what: str, method: Method
) -> np.ndarray:
    faiss = import_faiss()
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(rows), min(method.samples(num_clusters), len(rows)), replace=False))
    if len(chosen) < num_clusters:
        raise ValueError(f"num_samples {len(chosen)} are fewer than the {num_clusters} clusters of {what}: raise it")
    sample = features[rows[chosen]].astype(np.float32, copy=False)
    # Far from the origin, faiss's distances are inexact
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    _require_finite(sample, what)
    sample -= mean
    # faiss would split a cluster of equal features in two, and tell them apart by rounding
    sampled = what if len(sample) == len(rows) else f"sampled {what}"
    _require_clusters(_count_different(sample, num_clusters), num_clusters, len(sample), sampled)
    search = faiss.Kmeans(
        sample.shape[1],
        num_clusters,
        nredo=method.n_init,
        seed=int(rng.integers(2**31)),
        # faiss warns below the first, and takes a sample of its own above the second
        min_points_per_centroid=1,
        max_points_per_centroid=len(sample),
    )
    search.train(sample)
    del sample
    labels = np.empty(len(rows), int)
    for start, chunk in _chunks(features, rows):
        _require_finite(chunk, what)
        chunk -= mean
        labels[start : start + len(chunk)] = search.index.search(chunk, 1)[1][:, 0]
    return labels


def _chunks(features: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Copies of the rows, some at a time in float32, with the position of the first."""
    for start in range(0, len(rows), CHUNK):
        yield start, features[rows[start : start + CHUNK]].astype(np.float32, copy=False)


def _count_different(features: np.ndarray, enough: int) -> int:
    """Different rows, counted until there are enough."""
    different = set()
    for row in features:
        different.add(row.tobytes())
        if len(different) == enough:
            break
    return len(different)


def _require_finite(features: np.ndarray, what: str) -> None:
    with np.errstate(over="ignore"):
        # Without an array of squares. Those of float16 would not be finite
        lengths = np.einsum("ij,ij->i", features, features, dtype=np.result_type(features, np.float32))
    if not np.isfinite(lengths).all():
        raise ValueError(f"the {what} are not finite, or so large that their squares are not")


def _require_clusters(found: int, num_clusters: int, num_features: int, what: str) -> None:
    if found < num_clusters:
        raise ValueError(
            f"only {found} of {num_clusters} clusters of {what} have samples: too few of the {num_features} {what} "
            "differ, or too many are equal. Ask for fewer clusters, or look at the model they come from"
        )


def has_faiss() -> bool:
    return importlib.util.find_spec("faiss") is not None


def import_faiss():
    """
    Raises:
        ValueError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ValueError(f"K-means by faiss, the default above {MANY:,} features: {INSTALL_FAISS}") from error
    return faiss
