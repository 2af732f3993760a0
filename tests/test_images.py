"""Pixels: what files of every kind become, and what is refused."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import images
from data.images import decode_image

RED, GREEN = (255, 0, 0), (0, 255, 0)


def encoded(image, format="png", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return {"bytes": file.getvalue(), "path": f"image.{format}"}


def half_red():
    """40 x 20, the left half red, the right half green."""
    image = PIL.Image.new("RGB", (40, 20), GREEN)
    image.paste(RED, (0, 0, 20, 20))
    return image


@pytest.mark.parametrize("format", ["jpeg", "png", "webp", "tiff"])
@pytest.mark.parametrize("decoded", [False, True], ids=["encoded", "decoded"])
def test_exif_rotation_is_applied(format, decoded):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: left becomes top
    value = encoded(half_red(), format, exif=exif)
    image = decode_image(PIL.Image.open(io.BytesIO(value["bytes"])) if decoded else value)
    assert image.size == (20, 40)
    for place, color in (((10, 5), RED), ((10, 35), GREEN)):
        assert np.abs(np.subtract(image.getpixel(place), color)).max() < 10


def gradient(dtype, top):
    return np.linspace(0, top, 256).reshape(16, 16).astype(dtype)


@pytest.mark.parametrize(
    ("array", "format"),
    [
        (gradient(np.uint16, 65535), "png"),
        (gradient(np.int32, 65535), "tiff"),
        (gradient(np.int32, 255), "tiff"),
        (gradient(np.float32, 1), "tiff"),
        (gradient(np.float32, 65535), "tiff"),
        (gradient(np.float32, 12) - 5, "tiff"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}-{value.max():.0f}",
)
def test_deep_gray_is_scaled(array, format):
    expected = np.arange(256).reshape(16, 16)
    original = PIL.Image.fromarray(array)
    for value in (original, encoded(original, format)):
        pixels = np.asarray(decode_image(value)).astype(int)
        assert np.abs(pixels - expected[..., None]).max() <= 1


def drawings():
    """A black square on what is transparent, in every mode that has transparency."""

    def drawn(mode, background, black):
        image = PIL.Image.new(mode, (16, 16), background)
        image.paste(black, (4, 4, 12, 12))
        return image

    rgba, palette = drawn("RGBA", (0, 0, 0, 0), (0, 0, 0, 255)), drawn("P", 0, 1)
    palette.putpalette([0, 0, 255, 0, 0, 0])
    return {
        "RGBA": rgba,
        "LA": rgba.convert("LA"),
        "PA": rgba.convert("PA"),
        "RGBA png": encoded(rgba),
        "RGBA webp": encoded(rgba, "webp", lossless=True),
        "LA png": encoded(rgba.convert("LA")),
        "P png": encoded(palette, transparency=0),
        "RGB png": encoded(drawn("RGB", (1, 2, 3), (0, 0, 0)), transparency=(1, 2, 3)),
        "L png": encoded(drawn("L", 9, 0), transparency=9),
    }


@pytest.mark.parametrize("mode", list(drawings()))
def test_transparency_is_laid_on_white(mode):
    expected = np.full((16, 16, 3), 255)
    expected[4:12, 4:12] = 0
    assert np.array_equal(decode_image(drawings()[mode]), expected)
    assert decode_image(PIL.Image.new("RGBA", (4, 4), (0, 0, 0, 128))).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_colors_stay(mode):
    image = half_red().convert(mode)
    expected = np.asarray(half_red().convert(mode if mode in ("1", "L") else "RGB").convert("RGB")).astype(int)
    assert np.abs(np.asarray(decode_image(image)) - expected).max() < 16


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((10_000, 9_000), f"10000 x 9000 pixels are more than {images.MAX_PIXELS:,}"),
        ((3, 20_000), "3 x 20000 pixels are longer than 100 to 1"),
    ],
)
def test_too_large_and_too_long_images_are_refused_before_they_are_decoded(size, message, monkeypatch):
    value = encoded(PIL.Image.new("L", (1, 1)))["bytes"]
    header = b"IHDR" + struct.pack(">II", *size) + value[24:29]
    png = value[:12] + header + struct.pack(">I", zlib.crc32(header)) + value[33:]
    monkeypatch.setattr(PIL.Image.Image, "load", None)  # whatever decodes would say so
    for value in ({"bytes": png, "path": None}, PIL.Image.open(io.BytesIO(png))):
        with pytest.raises(OSError, match=message):
            decode_image(value)


@pytest.mark.parametrize("format", ["gif", "webp", "png", "tiff", "mpo"])
def test_of_several_frames_the_first(format):
    frames = [PIL.Image.new("RGB", (16, 16), color) for color in (RED, GREEN)]
    value = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert np.abs(np.subtract(decode_image(value).getpixel((3, 3)), RED)).max() < 10


def test_no_program_is_started(monkeypatch):
    """Pillow hands EPS over to Ghostscript."""
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda *args, **_: started.append(args))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    with pytest.raises(OSError, match="no image of the formats"):
        decode_image(encoded(half_red(), "eps"))
    assert not started


@pytest.mark.parametrize("value", [None, {}, {"bytes": None, "path": None}, 3, "", "nul\0.png", ".", "nowhere.png"])
def test_no_image(value):
    with pytest.raises(OSError):
        decode_image(value)


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
WHOLE = {name: encoded(half_red(), name) for name in "webp tiff bmp ico ppm tga dds qoi icns sgi pcx".split()}
WHOLE |= {
    "jpeg": encoded(half_red(), "jpeg", exif=TURNED),
    "png": encoded(PIL.Image.fromarray(gradient(np.uint16, 65535))),
    "gif": encoded(half_red(), "gif", save_all=True, append_images=[half_red().rotate(180)]),
}


@pytest.mark.filterwarnings("ignore")  # Pillow's, of what is damaged
@settings(max_examples=400, deadline=None)
@given(data=st.data(), format=st.sampled_from(sorted(WHOLE)))
def test_damaged_files_raise_nothing_but_oserror(data, format):
    whole = bytearray(WHOLE[format]["bytes"])
    for _ in range(data.draw(st.integers(0, 8), "changes")):
        # Most of what can go wrong is said in the first bytes
        last = data.draw(st.sampled_from([min(99, len(whole) - 1), len(whole) - 1]))
        whole[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(whole), data.draw(st.integers(0, len(whole)))]))
    try:
        image = decode_image({"bytes": bytes(whole[:end]), "path": None})
    except OSError:
        return
    assert image.mode == "RGB" and image.width * image.height <= images.MAX_PIXELS
