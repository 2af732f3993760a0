"""Retrieval in both directions, with any number of captions an image and of images a caption."""

from collections.abc import Sequence

import numpy as np

# Similarities closer than this are a tie: a matrix product rounds equal candidates differently, by their place in it.
TIE = 1e-6
# Similarities that are held at a time: 64 MiB
AT_ONCE = 2**24


def retrieval_metrics(
    image_embeds: np.ndarray,
    text_embeds: np.ndarray,
    image_of_text: Sequence[int] | Sequence[Sequence[int]],
    ks: tuple[int, ...] = (1, 5, 10),
    chunk_size: int | None = None,
    query_embeds: np.ndarray | None = None,
) -> dict[str, float]:
    """Recall at k: the share of queries with a right candidate among the first k.

    A wrong candidate as similar as the best right one, to 1e-6, counts as before it, so that equal embeddings score
    nothing: a query's rank is the number of such and better wrong candidates. An image's query is answered by any of
    its captions; its other captions do not count as wrong. A caption's query is answered by any of its images.

    Args:
        image_embeds: (images, D), normalized.
        text_embeds: (texts, D), normalized.
        image_of_text: (texts,), the image that each text describes, or all of them where there are several.
        query_embeds: (texts, D), the texts as queries, where they differ from the texts as candidates, as those of an
            ensemble do whose weights depend on the query.
        chunk_size: queries whose similarities to all candidates are held at a time; default: at most 1024, and
            `AT_ONCE` similarities.

    Returns:
        `image_to_text_recall@k` and `text_to_image_recall@k`.

    Raises:
        ValueError: a text has no image, or an image no text; an embedding is not finite.
    """
    num_images = len(image_embeds)
    if len(image_of_text) != len(text_embeds):
        raise ValueError(f"image_of_text has {len(image_of_text)} entries, but there are {len(text_embeds)} texts")
    images, texts = _pairs(image_of_text)
    if set(images.tolist()) != set(range(num_images)) or len(np.unique(texts)) < len(text_embeds):
        raise ValueError(
            f"image_of_text must name each of the {num_images} images, and no other, at least once, and one a text"
        )
    if not (np.isfinite(image_embeds).all() and np.isfinite(text_embeds).all()):
        raise ValueError("image_embeds and text_embeds must be finite")
    queries = text_embeds if query_embeds is None else query_embeds
    by_image = np.argsort(images, kind="stable")
    ranks = {
        "image_to_text": _ranks(image_embeds, text_embeds, images[by_image], texts[by_image], chunk_size),
        "text_to_image": _ranks(queries, image_embeds, texts, images, chunk_size),
    }
    return {f"{name}_recall@{k}": float((rank < k).mean()) for name, rank in ranks.items() for k in ks}


def require_unit_length(**embeddings: np.ndarray) -> None:
    """Raises a ValueError if an embedding is not of length 1. The metrics do not ask: those of mixtures have others."""
    for name, embeds in embeddings.items():
        lengths = np.linalg.norm(embeds, axis=-1)
        others = lengths[np.abs(lengths - 1) > 1e-3]
        if others.size:
            raise ValueError(f"{name} has an embedding of length {others[0]:.4g}: divide each by its length")


def _pairs(image_of_text) -> tuple[np.ndarray, np.ndarray]:
    """(pairs,) images and (pairs,) texts that belong together, by text."""
    if len(image_of_text) == 0 or np.isscalar(image_of_text[0]):
        return np.asarray(image_of_text), np.arange(len(image_of_text))
    images = [np.unique(of_text) for of_text in image_of_text]
    return np.concatenate(images), np.repeat(np.arange(len(images)), [len(of_text) for of_text in images])


def _ranks(queries, candidates, right_queries, right_candidates, chunk_size) -> np.ndarray:
    """Per query, how many wrong candidates are at least as similar as the best right one.

    Args:
        right_queries, right_candidates: each query beside each of its right candidates, in the order of the queries.
    """
    chunk_size = chunk_size or min(1024, max(1, AT_ONCE // len(candidates)))
    ranks = []
    for start in range(0, len(queries), chunk_size):
        pairs = slice(*np.searchsorted(right_queries, [start, start + chunk_size]))
        rows, columns = right_queries[pairs] - start, right_candidates[pairs]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        ranks.append(_ranks_of_chunk(queries[start : start + chunk_size] @ candidates.T, rows, columns, starts))
    return np.concatenate(ranks)


def _ranks_of_chunk(similarity: np.ndarray, rows: np.ndarray, columns: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """See `_ranks`. The right candidates are in `rows` and `columns`, one query after the other, from `starts` on."""
    right = similarity[rows, columns]
    threshold = np.maximum.reduceat(right, starts) - TIE
    as_similar = np.count_nonzero(similarity >= threshold[:, None], axis=1)
    return as_similar - np.add.reduceat((right >= threshold[rows]).astype(int), starts)
