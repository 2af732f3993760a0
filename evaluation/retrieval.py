"""Retrieval in both directions, with any number of captions an image."""

import numpy as np

# Similarities closer than this are a tie: a matrix product rounds equal candidates differently, by their place in it.
TIE = 1e-6


def retrieval_metrics(
    image_embeds: np.ndarray,
    text_embeds: np.ndarray,
    image_of_text: np.ndarray,
    ks: tuple[int, ...] = (1, 5, 10),
    chunk_size: int = 1024,
    query_embeds: np.ndarray | None = None,
) -> dict[str, float]:
    """Recall at k: the share of queries with a right candidate among the first k.

    A wrong candidate as similar as the best right one, to 1e-6, counts as before it, so that equal embeddings score
    nothing: a query's rank is the number of such and better wrong candidates. An image's query is answered by any of
    its captions; its other captions do not count as wrong.

    Args:
        image_embeds: (images, D), normalized.
        text_embeds: (texts, D), normalized.
        image_of_text: (texts,), the image that each text describes.
        query_embeds: (texts, D), the texts as queries, where they differ from the texts as candidates, as those of an
            ensemble do whose weights depend on the query.
        chunk_size: queries whose similarities are held at a time.

    Returns:
        `image_to_text_recall@k` and `text_to_image_recall@k`.

    Raises:
        ValueError: a text has no image, or an image no text; an embedding is not finite.
    """
    image_of_text = np.asarray(image_of_text)
    num_images = len(image_embeds)
    if image_of_text.shape != (len(text_embeds),):
        raise ValueError(f"image_of_text has the shape {image_of_text.shape}, but there are {len(text_embeds)} texts")
    if set(image_of_text.tolist()) != set(range(num_images)):
        raise ValueError(f"image_of_text must name each of the {num_images} images, and no other, at least once")
    if not (np.isfinite(image_embeds).all() and np.isfinite(text_embeds).all()):
        raise ValueError("image_embeds and text_embeds must be finite")
    queries = text_embeds if query_embeds is None else query_embeds
    ranks = {
        "image_to_text": _ranks(image_embeds, text_embeds, np.arange(num_images), image_of_text, chunk_size),
        "text_to_image": _ranks(queries, image_embeds, image_of_text, np.arange(num_images), chunk_size),
    }
    return {f"{name}_recall@{k}": float((rank < k).mean()) for name, rank in ranks.items() for k in ks}


def _ranks(queries, candidates, query_images, candidate_images, chunk_size) -> np.ndarray:
    """Per query, how many wrong candidates are at least as similar as the best right one."""
    ranks = []
    for start in range(0, len(queries), chunk_size):
        chunk = slice(start, start + chunk_size)
        similarity = queries[chunk] @ candidates.T
        right = query_images[chunk, None] == candidate_images[None]
        best = np.where(right, similarity, -np.inf).max(axis=1, keepdims=True)
        ranks.append(((similarity >= best - TIE) & ~right).sum(axis=1))
    return np.concatenate(ranks)
