"""Images as models see them: upright, RGB, 8 bits a channel."""

import base64
import io
import os
import re
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import PIL.Image
import PIL.ImageOps

from clip_moe.data.shards import MEMBER, read_member

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
# Values below or above their range that mark missing data: geographers', of 16 bits with a sign, and of floats
NO_DATA = (-9999, -32768, float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))
# Tags of a TIFF
BITS, PHOTOMETRIC, SAMPLE_FORMAT, GDAL_NO_DATA = 258, 262, 339, 42113
SIGNED = 2  # of SAMPLE_FORMAT
# Fewest bytes of an image, and its first ones: base64 of anything else is a path
SMALLEST = 32
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
# The longer side by the shorter one. Processors resize the shorter side to the model's (3 x 20,000 pixels become
# 224 x 1,493,333) before they crop.
MAX_ASPECT_RATIO = 100


def decode_image(value: Any) -> PIL.Image.Image:
    """An upright RGB image from what an image column holds: a PIL image, a path, or bytes and path, which may have a
    `pixel_range`.

    It is turned as EXIF says. Transparent parts are laid on white. The first of several frames counts. Gray of more
    than 8 bits is scaled from its `pixel_range`, or else from that of its format: all values of unsigned integers, 0 to
    1 of floats. Gaps (NaN, infinite and no-data values) are black. Its `info["pixels"]` holds the share of gaps, the
    least and the greatest value, black and white.

    Raises:
        OSError: whatever else the image is: not there, no image, cut short, larger than `MAX_PIXELS` or longer than
            `MAX_ASPECT_RATIO`; nothing but gaps; of values for which neither its format nor `pixel_range` has a range.
    """
    try:
        if isinstance(value, PIL.Image.Image):
            if value.format == "TIFF" and value.tile and value.filename:  # not decoded yet, see below
                return decode_image(value.filename)
            depth = _Depth(value)
            return _rgb(PIL.ImageOps.exif_transpose(value), depth)
        # Pillow scrambles a turned, uncompressed TIFF that it opens by its path, but not one that is open
        with _open(value) as file, PIL.Image.open(file, formats=FORMATS) as image:
            depth = _Depth(image, value.get("pixel_range") if isinstance(value, dict) else None)
            PIL.ImageOps.exif_transpose(image, in_place=True)  # decodes it, too, while its file is open
            # JPEGs are RGB without a copy: nothing else is read of their files
            return image if image.format == "JPEG" and image.mode == "RGB" else _rgb(image, depth)
    except Exception as error:  # damaged files end in struct.error, SyntaxError, EOFError, KeyError and many more
        raise OSError(_problem(error)) from error


def _problem(error: Exception) -> str:
    """The reason why an image cannot be read, by the error of Pillow or of the file system."""
    if isinstance(error, PIL.UnidentifiedImageError):
        return f"it is not an image of the formats {', '.join(FORMATS)}, with bits and bands that Pillow reads"
    if isinstance(error, FileNotFoundError) and not os.path.isabs(error.filename):
        return f"{error}: relative paths start from image_root or else from the working directory"
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def from_base64(text: str) -> bytes | None:
    """The bytes of an image that a text holds in base64, perhaps as a `data:` URL; None: it may be a path."""
    mark = re.match(r"data:image/[\w.+-]+;base64,", text)
    try:
        content = base64.b64decode("".join(text[mark.end() if mark else 0 :].split()), validate=True)
    except ValueError:  # also of letters that are not ASCII
        return None
    return content if content.startswith(BEGINNINGS) and len(content) >= SMALLEST else None


def _open(value: Any) -> BinaryIO:
    if isinstance(value, str):
        value = {"path": value}
    if isinstance(value, dict) and value.get("bytes") is not None:
        content = value["bytes"]
        return io.BytesIO((from_base64(content.decode()) if content.isascii() else None) or content)
    if isinstance(value, dict) and value.get("path") and MEMBER.fullmatch(value["path"]):
        return io.BytesIO(read_member(value["path"]))
    if isinstance(value, dict) and value.get("path"):
        return open(value["path"], "rb")
    raise OSError("no image, or a list of several")


class _Depth:
    """The meaning of an image's values: facts of its file, which Pillow drops when it turns or crops. An OSError of one
    that must not be decoded."""

    def __init__(self, image: PIL.Image.Image, pixel_range: Sequence[float] | None = None):
        width, height = image.size  # of the header: nothing is decoded yet
        tags = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
        tiles = str(getattr(image, "tile", ""))
        self.pixel_range, self.is_inverted = pixel_range, tags.get(PHOTOMETRIC) == 0
        self.no_data = _number(tags.get(GDAL_NO_DATA))
        self.transparency = _transparency(image, tiles)
        self.is_gray = image.mode.startswith(("I", "F"))  # of more than 8 bits
        self.is_deep_color = ";16" in tiles and not self.is_gray  # which Pillow reads at 8 bits
        is_scaled = self.is_deep_color or self.is_gray and ("ppm" in tiles or image.format == "JPEG2000")
        is_long = max(width, height) > MAX_ASPECT_RATIO * min(width, height)
        is_signed = SIGNED in tags.get(SAMPLE_FORMAT, ()) and not self.is_gray
        scaled = "Pillow scales its values, so that pixel_range cannot apply: save it with 8 bits, or gray as PNG"
        checks = [
            (width * height > MAX_PIXELS, f"{width} x {height} pixels are more than {MAX_PIXELS:,}"),
            (is_long, f"{width} x {height} pixels are longer than {MAX_ASPECT_RATIO} to 1"),
            (is_signed, "its values are signed integers of 8 bits, which Pillow reads as unsigned"),
            (is_scaled and pixel_range is not None, scaled),
        ]
        for is_wrong, problem in checks:
            if is_wrong:
                raise OSError(problem)
        if image.mode.startswith("I;16"):
            self.format_range = 0, 2 ** tags.get(BITS, (16,))[0] - 1
        elif image.mode == "I" and image.format in ("PNG", "PPM"):
            self.format_range = 0, 65535
        else:
            self.format_range = (0, 1) if image.mode == "F" else None


def _transparency(image: PIL.Image.Image, tiles: str) -> int | tuple[int, ...] | None:
    """The transparent gray or color of a PNG at the 8 bits that Pillow reads; None: it is right as it is."""
    value, is_deep = image.info.get("transparency"), ";16" in tiles
    if image.format != "PNG" or image.mode not in ("L", "RGB") or value is None:
        return None
    if isinstance(value, tuple):
        return tuple(part >> 8 for part in value) if is_deep else None
    levels = next((2**bits - 1 for bits in (2, 4) if f"'L;{bits}'" in tiles), 255)
    return value * 255 // levels


def _number(text: str | None) -> float:
    try:
        return float(text.strip("\0 "))
    except (AttributeError, ValueError):
        return np.nan  # equals nothing


def _rgb(image: PIL.Image.Image, depth: _Depth) -> PIL.Image.Image:
    pixels = None
    if depth.is_gray:
        image, pixels = _eight_bits(image, depth)
    elif depth.is_deep_color:
        highest = max(high for _, high in image.convert("RGB").getextrema())
        pixels = [0.0, 0.0, highest * 257.0, 0.0, 65535.0]
    if depth.transparency is not None:
        image.info["transparency"] = depth.transparency
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image  # which becomes nothing else
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    image = image.convert("RGB")
    image.info["pixels"] = pixels
    return image


def _eight_bits(image: PIL.Image.Image, depth: _Depth) -> tuple[PIL.Image.Image, list[float]]:
    """Gray of 16 or 32 bits as gray of 8, and `info["pixels"]` of `decode_image`."""
    pixels = np.asarray(image).astype(np.float64)
    black, white = depth.pixel_range or depth.format_range or (-np.inf, np.inf)
    is_outside = (pixels < black) | (pixels > white)
    gaps = ~np.isfinite(pixels) | (pixels == depth.no_data) | np.isin(pixels, NO_DATA) & is_outside
    values, problem = pixels[~gaps], ""
    if len(values) == 0:
        problem = "all its pixels are NaN, infinite or no-data values"
    elif depth.pixel_range is None and (depth.format_range is None or (is_outside & ~gaps).any()):
        known = "for floats, 0 is black and 1 is white" if image.mode == "F" else "its format has no black and white"
        problem = f"its values go from {values.min():.7g} to {values.max():.7g}, but {known}: set pixel_range to those "
        problem += "of the data"
    if problem:
        raise OSError(problem)
    start, end = (white, black) if depth.is_inverted else (black, white)
    scaled = np.clip((pixels - start) * (255 / (end - start)), 0, 255)
    scaled[gaps] = 0
    scaled[pixels == image.info.get("transparency", np.nan)] = 255
    facts = [float(value) for value in (gaps.mean(), values.min(), values.max(), black, white)]
    return PIL.Image.fromarray(scaled.round().astype(np.uint8)), facts
