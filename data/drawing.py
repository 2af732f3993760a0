"""Tools that the worlds draw with: inks, grounds, noise, and stamps."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image as PILImage

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
TEXTURES = ["plain", "striped", "dotted", "checkered"]


def choose(rng: np.random.Generator, values: Sequence):
    """One of them at random, all alike."""
    return values[int(rng.integers(len(values)))]


def font_file(name: str) -> str:
    """The path of a font of matplotlib."""
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")


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
