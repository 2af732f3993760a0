"""Retrieval in both directions, with any number of captions an image."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

# Similarities closer than this are a tie: a matrix product rounds equal candidates differently, by their place in it.
TIE = 1e-6
# Similarities that are held at a time, 64 MiB, and queries
SCORES_AT_ONCE, QUERIES_AT_ONCE = 2**24, 1024
# Queries whose similarities settle the temperature of `information`, and the logarithms of 1 / temperature to search:
# embeddings of a model that has learned little lie close together
FITTED, SCALES = 1024, (-3, 14)


def retrieval_metrics(
    image_embeds: np.ndarray,
    text_embeds: np.ndarray,
    image_of_text: Sequence[int],
    ks: tuple[int, ...] = (1, 5, 10),
    query_embeds: np.ndarray | None = None,
    wanted: Collection[str] = (),
    text_of_pair: Sequence[int] | None = None,
) -> dict[str, float]:
    """Recall at k: the share of queries with a right candidate among the first k.

    A query's rank is the number of wrong candidates at least as similar as the best right one, to 1e-6, so that equal
    embeddings score nothing. An image's query is answered by any of its captions; the others do not count as wrong.

    Args:
        image_embeds: (images, D), normalized.
        text_embeds: (texts, D), normalized.
        image_of_text: (texts,), the image that each text describes.
        query_embeds: (texts, D), the texts as queries where they differ, as those of an ensemble whose weights depend
            on the query.
        text_of_pair: (pairs,), for texts that describe several images: the text of each right pair, whose image
            `image_of_text` then names. None: each text has one image.
        wanted: `image_to_text_information` and `text_to_image_information`, which take several times as long.

    Returns:
        `image_to_text_recall@k`, `text_to_image_recall@k` and what is wanted.

    Raises:
        ValueError: a text has no image, or an image no text.
    """
    images = np.asarray(image_of_text)
    texts = np.arange(len(text_embeds)) if text_of_pair is None else np.asarray(text_of_pair)
    if len(images) != len(texts) or set(images.tolist()) != set(range(len(image_embeds))):
        raise ValueError(
            f"image_of_text must have an image for each of the {len(texts)} texts, and each of the {len(image_embeds)} "
            "images at least once"
        )
    queries = text_embeds if query_embeds is None else query_embeds
    by_image, by_text = np.argsort(images, kind="stable"), np.argsort(texts, kind="stable")
    searches = {
        "image_to_text": Search(image_embeds, text_embeds, images[by_image], texts[by_image]),
        "text_to_image": Search(queries, image_embeds, texts[by_text], images[by_text]),
    }
    metrics = {}
    for way, search in searches.items():
        # `map` holds one chunk at a time, a loop two
        ranks = np.concatenate(list(map(_ranks, search.chunks(range(len(search.queries))))))
        metrics |= {f"{way}_recall@{k}": float((ranks < k).mean()) for k in ks}
    by_metric = {f"{way}_information": search for way, search in searches.items()}
    return metrics | {name: information(search) for name, search in by_metric.items() if name in wanted}


class Chunk(NamedTuple):
    """The similarities (n, candidates) of some queries; the rows and columns of the right ones, query by query, and
    where each query's begin (n,)."""

    similarities: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    starts: np.ndarray


class Search(NamedTuple):
    """Queries (queries, D) and candidates (candidates, D); each query beside each of its right candidates, (pairs,) in
    the order of the queries."""

    queries: np.ndarray
    candidates: np.ndarray
    right_queries: np.ndarray
    right_candidates: np.ndarray

    def chunks(self, chosen: Sequence[int]) -> Iterator[Chunk]:
        """The chosen queries in chunks that fit in memory."""
        chunk_size = min(QUERIES_AT_ONCE, max(1, SCORES_AT_ONCE // len(self.candidates)))
        chosen = np.asarray(chosen)
        first, behind = np.searchsorted(self.right_queries, chosen), np.searchsorted(self.right_queries, chosen + 1)
        for start in range(0, len(chosen), chunk_size):
            chunk = slice(start, start + chunk_size)
            lengths = (behind - first)[chunk]
            starts = np.cumsum(lengths) - lengths
            rows = np.repeat(np.arange(len(lengths)), lengths)
            columns = self.right_candidates[np.arange(lengths.sum()) + np.repeat(first[chunk] - starts, lengths)]
            yield Chunk(self.queries[chosen[chunk]] @ self.candidates.T, rows, columns, starts)


def information(search: Search) -> float:
    """The share 1 - L / log2 N of what there is to tell, the right one of N candidates, that similarities tell.

    L is the contrastive loss in bits (InfoNCE, arXiv:1807.03748, eq. 5) at the best temperature, so a model that knows
    nothing has 0. It tells models apart whose recall at 1 is near 0; times the queries and log2 N, it is how many bits
    a model remembers. Several right candidates of a query answer it together.
    """

    def loss(chunks: Iterable[Chunk], scale: float) -> float:
        def chunk_losses(chunk: Chunk) -> np.ndarray:
            right = np.logaddexp.reduceat(scale * chunk.similarities[chunk.rows, chunk.columns], chunk.starts)
            return logsumexp(scale * chunk.similarities, axis=1) - right

        return float(np.concatenate(list(map(chunk_losses, chunks))).mean())

    all_queries, num_candidates = range(len(search.queries)), len(search.candidates)
    step = max(-(-len(all_queries) // FITTED), -(-len(all_queries) * num_candidates // SCORES_AT_ONCE))
    fitted = list(search.chunks(all_queries[::step]))
    best = minimize_scalar(lambda log_scale: loss(fitted, np.exp(log_scale)), bounds=SCALES, method="bounded")
    chance = np.log(num_candidates / np.bincount(search.right_queries)).mean()
    lacking = loss(search.chunks(all_queries), np.exp(best.x))
    return max(0.0, float(1 - lacking / chance)) if chance else 1.0  # each candidate is right: nothing to tell


def batch_loss(
    image_embeds: np.ndarray, text_embeds: np.ndarray, captions: Sequence[int], batch_size: int
) -> dict[str, float]:
    """The contrastive loss of pairs at their best temperature, and chance: that of equal similarities, in nats.

    Pairs are compared within random batches, of 1,024 pairs at most. Equal captions are right together, as in
    `information`.

    Args:
        image_embeds, text_embeds: (pairs, D), normalized.
        captions: (pairs,) the number of each pair's caption.
        batch_size: pairs in a batch.
    """
    size = min(batch_size, len(captions), QUERIES_AT_ONCE)
    order = np.random.default_rng(0).permutation(len(captions))[: SCORES_AT_ONCE // size]
    batches = order[: len(order) // size * size].reshape(-1, size)
    similarities = image_embeds[batches] @ text_embeds[batches].swapaxes(1, 2)  # (batches, size, size)
    numbers = np.asarray(captions)[batches]
    is_right = numbers[:, :, None] == numbers[:, None]

    def loss(scale: float) -> float:
        scaled = scale * similarities
        right = np.where(is_right, scaled, -np.inf)
        return float(np.mean([(logsumexp(scaled, axis=way) - logsumexp(right, axis=way)).mean() for way in (1, 2)]))

    best = minimize_scalar(lambda log_scale: loss(np.exp(log_scale)), bounds=SCALES, method="bounded")
    return {"loss": best.fun, "chance": loss(0.0)}


def _ranks(chunk: Chunk) -> np.ndarray:
    """Per query, how many wrong candidates are at least as similar as the best right one."""
    similarities, rows, columns, starts = chunk
    right = similarities[rows, columns]
    threshold = np.maximum.reduceat(right, starts) - TIE
    as_similar = np.count_nonzero(similarities >= threshold[:, None], axis=1)
    return as_similar - np.add.reduceat((right >= threshold[rows]).astype(int), starts)
