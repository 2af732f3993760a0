"""Images as models see them: upright, RGB, 8 bits a channel."""

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from data.shards import MEMBER, read_member

PIL.Image.init()
# Formats of pictures that Pillow decodes itself; EPS, for one, would start Ghostscript. TGA comes last: its
# files have no mark that tells them.
FORMATS = tuple(
    name
    for name in "AVIF BMP DDS DIB GIF ICNS ICO JPEG JPEG2000 PCX PNG PPM QOI SGI TIFF WEBP TGA".split()
    if name in PIL.Image.OPEN  # AVIF may be missing
)
# Pillow's limit for decompression bombs: 256 MiB as RGB. A photo of 80 megapixels is read.
MAX_PIXELS = 89_478_485
# The longer side by the shorter one. Processors resize the shorter side to the model's (3 x 20,000 pixels become
# 224 x 1,493,333) before they crop.
MAX_ASPECT_RATIO = 100


def decode_image(value: Any) -> PIL.Image.Image:
    """An upright RGB image from what an image column holds: a PIL image, a path, or bytes and path, which may have a
    `box` (left, upper, right, lower) that alone counts.

    It is turned as EXIF says. Transparent parts are laid on white. Gray of more than 8 bits is scaled, not clipped. The
    first of several frames counts.

    Raises:
        OSError: whatever else the image is: not there, no image, cut short, larger than `MAX_PIXELS` or longer than
            `MAX_ASPECT_RATIO`.
    """
    try:
        if isinstance(value, PIL.Image.Image):
            _require_size(value)
            return _rgb(PIL.ImageOps.exif_transpose(value))
        with PIL.Image.open(_file(value), formats=FORMATS) as image:
            _require_size(image)
            PIL.ImageOps.exif_transpose(image, in_place=True)  # decodes it, too, while its file is open
            if isinstance(value, dict) and value.get("box") is not None:
                return _rgb(_crop(image, value["box"]))
            # JPEGs are RGB without a copy: nothing else is read of their files
            return image if image.format == "JPEG" and image.mode == "RGB" else _rgb(image)
    except PIL.UnidentifiedImageError as error:
        raise OSError(f"it is no image of the formats {', '.join(FORMATS)}") from error
    except FileNotFoundError as error:
        if os.path.isabs(error.filename):
            raise
        raise OSError(f"{error}: relative paths start from image_root or else from the working directory") from error
    except OSError:
        raise
    except Exception as error:  # damaged files end in struct.error, SyntaxError, EOFError, KeyError and many more
        raise OSError(f"{type(error).__name__}: {error}") from error


def _crop(image: PIL.Image.Image, box: Sequence[float]) -> PIL.Image.Image:
    """The part of an image in a box, which may go over its edges: what is outside is black."""
    left, upper, right, lower = box
    if min(right, image.width) <= max(left, 0) or min(lower, image.height) <= max(upper, 0):
        raise OSError(f"its box {box} has nothing of its {image.width} x {image.height} pixels")
    return image.crop(box)


def _file(value: Any) -> str | io.BytesIO:
    if isinstance(value, str):
        value = {"path": value}
    if isinstance(value, dict) and value.get("bytes") is not None:
        return io.BytesIO(value["bytes"])
    if isinstance(value, dict) and value.get("path") and MEMBER.fullmatch(value["path"]):
        return io.BytesIO(read_member(value["path"]))
    if isinstance(value, dict) and value.get("path"):
        return value["path"]
    raise OSError("there is no image")


def _require_size(image: PIL.Image.Image) -> None:
    width, height = image.size  # of the header: nothing is decoded yet
    if width * height > MAX_PIXELS:
        raise OSError(f"{width} x {height} pixels are more than {MAX_PIXELS:,}")
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise OSError(f"{width} x {height} pixels are longer than {MAX_ASPECT_RATIO} to 1")


def _rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":  # becomes nothing but LA
        image = image.convert("LA")
    white = PIL.Image.new("RGBA", image.size, "white")
    return PIL.Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _eight_bits(image: PIL.Image.Image) -> PIL.Image.Image:
    """Gray of 16 or 32 bits as gray of 8.

    The modes I and F do not tell what is white: it is the first of 1 (floats), 255 and 65,535 that is not exceeded.
    With values beyond, or below 0, the darkest becomes black and the brightest white.
    """
    pixels = np.asarray(image).astype(np.float64)
    low, high = 0.0, pixels.max()
    whites = [65535.0] if image.mode.startswith("I;16") else [1.0, 255.0, 65535.0][image.mode != "F" :]
    white = next((white for white in whites if high <= white), None)
    if white is None or pixels.min() < 0:
        low, white = pixels.min(), high
    scaled = (pixels - low) * (255 / max(white - low, np.finfo(np.float64).tiny))
    return PIL.Image.fromarray(scaled.round().astype(np.uint8))
