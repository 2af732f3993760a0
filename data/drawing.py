"""Tools that the built-in worlds draw with: inks, grounds, pen strokes, and how a drawing is placed."""

import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image as PILImage

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# Inks are dark and backgrounds light, as on paper, so that any two of them can be told apart. If both had the same
# colors, a small CLIP would have to learn every drawing in every pair of them, and needs several times as many steps.
COLORS = {
    "red": (200, 30, 30),
    "green": (20, 120, 40),
    "blue": (30, 60, 190),
    "purple": (125, 30, 145),
    "brown": (110, 65, 25),
    "black": (25, 25, 25),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "yellow": (245, 225, 100),
    "orange": (250, 175, 85),
    "pink": (250, 180, 205),
    "turquoise": (130, 225, 220),
    "gray": (190, 190, 190),
}
POSITIONS = {
    "center": (0, 0),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
# Where the first of two drawings is; the second is opposite
SIDES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
TEXTURES = ["plain", "striped", "dotted", "checkered"]
TEST_DIGITS = 5  # every fifth pen stroke is kept for the test split


def choose(rng: np.random.Generator, values: Sequence):
    """One of them at random, all alike."""
    return values[int(rng.integers(len(values)))]


def font_file(name: str) -> str:
    """The path of a font of matplotlib."""
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")


def article(words: str) -> str:
    """The words with "a" or "an"."""
    return f"{'an' if words[0] in 'aeio8' and words != 'one' else 'a'} {words}"


def stroke(digit: str, split: str, rng: np.random.Generator) -> PILImage.Image:
    """A handwritten digit, (64, 64), white on black. No pen stroke is in both splits."""
    drawn = PILImage.fromarray(choose(rng, _digit_images(split)[digit]))
    image = PILImage.new("L", (64, 64))
    # A margin: many strokes touch the border of their 8 x 8 pixels and would be cut when they are turned.
    image.paste(drawn.resize((54, 54), PILImage.Resampling.BICUBIC), (5, 5))
    return image


def distort(mask: PILImage.Image, rng: np.random.Generator) -> PILImage.Image:
    """A small random rotation, shear and stretch of a (64, 64) drawing about its center."""
    angle, shear = rng.uniform(-0.2, 0.2), rng.uniform(-0.15, 0.15)
    width, height = rng.uniform(0.9, 1.1, 2)
    matrix = np.array([[np.cos(angle), np.sin(angle) + shear], [-np.sin(angle), np.cos(angle)]])
    matrix = matrix * [[width], [height]]
    center = np.array([32, 32])
    shift = center - matrix @ center
    coefficients = (matrix[0, 0], matrix[0, 1], shift[0], matrix[1, 0], matrix[1, 1], shift[1])
    return mask.transform(mask.size, PILImage.Transform.AFFINE, coefficients, PILImage.Resampling.BILINEAR)


def place(
    mask: PILImage.Image, side: int, direction: Sequence[float], rng: np.random.Generator, image_size: int
) -> np.ndarray:
    """The share of each pixel that ink covers, (image_size, image_size, 1) from 0 to 1.

    Args:
        side: width and height of the drawing, in pixels.
        direction: from the image's center to the drawing's, in x and y; 1 is 0.8 of the way to the border.
    """
    mask = mask.resize((side, side), PILImage.Resampling.BOX)
    free = image_size - side
    x, y = (
        int(np.clip(round(free / 2 + part * free * 0.4 + rng.uniform(-0.04, 0.04) * image_size), 0, free))
        for part in direction
    )
    alpha = np.zeros((image_size, image_size, 1), np.float32)
    alpha[y : y + side, x : x + side, 0] = np.asarray(mask, np.float32) / 255
    return alpha


def ink_of(color: str, rng: np.random.Generator) -> np.ndarray:
    """An ink, about as it is called."""
    return np.float32(COLORS[color]) + rng.normal(0, 8, 3)


def ground(scene: Mapping[str, str], rng: np.random.Generator, image_size: int) -> np.ndarray:
    """The `background` and `texture` of a scene, (image_size, image_size, 3)."""
    color = np.float32(BACKGROUNDS[scene["background"]]) + rng.normal(0, 8, 3)
    # The texture is a darker shade of the background itself, still lighter than every ink.
    shade = color * 0.8
    y, x = np.mgrid[:image_size, :image_size] + rng.integers(8, size=2)[:, None, None]
    pattern = {
        "plain": np.zeros_like(x, bool),
        "striped": (x + y) % 8 < 3,
        "dotted": ((x % 6) < 2) & ((y % 6) < 2),
        "checkered": (x // 4 + y // 4) % 2 == 0,
    }[scene["texture"]]
    return np.where(pattern[..., None], shade, color)


def stamp(mask: np.ndarray, rng: np.random.Generator, image_size: int) -> np.ndarray:
    """A drawing moved by whole pixels, in an ink on a ground, noisy: (image_size, image_size, 3) uint8.

    Args:
        mask: (side, side), the share of each pixel that it covers, from 0 to 1.
    """
    side = len(mask)
    y, x = rng.integers(image_size - side + 1, size=2)
    alpha = np.zeros((image_size, image_size, 1), np.float32)
    alpha[y : y + side, x : x + side, 0] = mask
    paper = ground({"background": choose(rng, list(BACKGROUNDS)), "texture": "plain"}, rng, image_size)
    ink = ink_of(choose(rng, list(COLORS)), rng)
    return add_noise(alpha * ink + (1 - alpha) * paper, rng)


def add_noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image with a camera's noise, uint8."""
    return np.clip(image + rng.normal(0, 4, image.shape), 0, 255).astype(np.uint8)


def png(image: np.ndarray) -> dict[str, bytes]:
    """An image as a row of `datasets.Image` holds it."""
    buffer = io.BytesIO()
    PILImage.fromarray(image).save(buffer, "png", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


@cache
def _digit_images(split: str) -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(images)) % TEST_DIGITS == 0
    chosen = is_test if split == "test" else ~is_test
    images = (images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return {name: images[chosen & (labels == number)] for number, name in enumerate(DIGITS)}
