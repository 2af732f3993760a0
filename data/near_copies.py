"""Pictures that are the same under other bytes: in another format, compressed again, or scaled."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import datasets
import numpy as np
import PIL.Image
from tqdm.auto import trange

from clip_moe.data.images import decode_image
from clip_moe.engine.messages import warn_once

# Pictures read together (AT_ONCE); grids compared together (ROWS), of at most MOST pictures
AT_ONCE, ROWS, MOST = 1000, 256, 100_000
# A picture's grid has GRID fields a side, each the mean of its pixels; a smaller picture is compared by pixels alone
GRID, LEAST_SIDE = 16, 32
# Near copies correlate by at least CORRELATION, and no field differs by more than this share of the grid's range, nor
# by more levels than PLAIN and, where fields are of few pixels, FINE / side. So are JPEG of quality 75, lossy WEBP and
# half the size near copies, of photographs, drawings and noise from 32 to 224 pixels; of 500,000 pairs of symbols, 1 is
CORRELATION, SHARE, PLAIN, FINE = 0.85, 0.45, 8, 160 * GRID
# A picture that looks like more others is one of a kind, as of a part in its place or of a page, and no copy
MOST_ALIKE = 8
# Grids of fewer levels are of one color
LEAST_RANGE = 8


class Copies(NamedTuple):
    """Equal and nearly equal pictures."""

    pixels: list[str]  # a digest of the pixels of each picture
    near: np.ndarray  # (pairs, 2), the numbers of near copies
    num_too_alike: int = 0  # pictures that look like more than `MOST_ALIKE` others, and count as different

    def among(self, rows: np.ndarray) -> "Copies":
        """Those among some of the pictures, which have new numbers."""
        place = np.full(len(self.pixels), -1)
        place[rows] = np.arange(len(rows))
        near = place[self.near]
        return Copies([self.pixels[row] for row in rows], near[(near >= 0).all(axis=1)])

    def in_training(self, num_training: int) -> tuple[int, int]:
        """How many pictures after the first ones, those of training, have the same pixels as one of these, and how many
        others are nearly the same."""
        training, test = set(self.pixels[:num_training]), self.pixels[num_training:]
        both_ways = [*self.near.tolist(), *self.near[:, ::-1].tolist()]
        near = {self.pixels[second] for first, second in both_ways if self.pixels[first] in training} - training
        return sum(pixels in training for pixels in test), sum(pixels in near for pixels in test)


def find_copies(rows: datasets.Dataset) -> Copies:
    """Find copies among images, all readable. Among more than `MOST` different images, and below `LEAST_SIDE` pixels,
    only equal pixels count. Turned and cropped copies are not found."""
    looks = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in trange(0, len(rows), AT_ONCE, desc=f"comparing {len(rows)} images", delay=5, disable=None):
            images = rows.select(range(start, min(start + AT_ONCE, len(rows))))["image"]
            looks += pool.map(_look, images)
    pixels, sides = [look[0] for look in looks], np.array([look[1] for look in looks])
    different = np.sort(np.unique(pixels, return_index=True)[1])
    different = different[sides[different] >= LEAST_SIDE]
    if len(different) > MOST:
        warn_once(f"skipping the search for near copies: {len(different)} images, more than {MOST}")
        different = different[:0]
    grids = np.frombuffer(b"".join(looks[row][2] for row in different), np.uint8)
    near = _near(sides[different], grids.reshape(-1, GRID * GRID * 3))
    are_of_a_kind = np.bincount(near.ravel(), minlength=len(different)) > MOST_ALIKE
    near = near[~are_of_a_kind[near].any(axis=1)]
    return Copies(pixels, different[near], int(are_of_a_kind.sum()))


def _look(image: Any) -> tuple[str, int, bytes]:
    """The digest of a picture's pixels, its shorter side, and its grid."""
    picture = decode_image(image)
    pixels = hashlib.sha256(f"{picture.size}".encode() + picture.tobytes()).hexdigest()
    grid = picture.resize((GRID, GRID), PIL.Image.Resampling.BOX).tobytes()
    return pixels, min(picture.size), grid


def _near(sides: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """(pairs, 2) The numbers of near copies. Shapes: sides (pictures,), grids (pictures, GRID * GRID * 3)."""
    # Without each channel's mean: the color of a ground is no likeness
    channels = grids.reshape(len(grids), GRID, GRID, 3)
    vectors = channels - channels.mean(axis=(1, 2), keepdims=True, dtype=np.float32)
    ranges = np.ptp(vectors, axis=(1, 2, 3))
    # Four fields as one take a fourth of the time, and find all that may be near
    coarse = vectors.reshape(len(grids), GRID // 2, 2, GRID // 2, 2, 3).mean(axis=(2, 4))
    vectors, coarse = _unit_length(vectors.reshape(grids.shape)), _unit_length(coarse.reshape(-1, grids.shape[1] // 4))
    coarse[ranges < LEAST_RANGE] = 0
    pairs = [np.empty((0, 2), int)]
    for start in range(0, len(grids), ROWS):
        are_like = coarse[start : start + ROWS] @ coarse[start:].T >= CORRELATION
        for row in np.flatnonzero(np.triu(are_like, 1).any(axis=1)):
            picture, candidates = start + row, start + row + 1 + np.flatnonzero(are_like[row, row + 1 :])
            candidates = candidates[vectors[candidates] @ vectors[picture] >= CORRELATION]
            difference = np.abs(grids[candidates].astype(int) - grids[picture]).max(axis=1)
            limit = SHARE * np.minimum(ranges[candidates], ranges[picture])
            limit = np.minimum(limit, PLAIN + FINE / np.minimum(sides[candidates], sides[picture]))
            copies = candidates[difference <= limit]
            pairs.append(np.column_stack([np.full(len(copies), picture), copies]))
    return np.concatenate(pairs)


def _unit_length(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
