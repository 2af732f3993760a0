"""Pixels: what files of every kind become, and what is refused."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clip_moe.data import images
from clip_moe.data.images import decode_image

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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["L", "I;16", "RGB", "RGBA", "CMYK"])
def test_a_file_gives_the_pixels_of_its_bytes(mode, orientation, tmp_path):
    """Also a plain TIFF, which Pillow maps into memory; as a path, and as an image that was opened by one."""
    exif, ramp = PIL.Image.Exif(), np.arange(24, dtype=np.uint16).reshape(4, 6)
    exif[0x0112] = orientation
    image = PIL.Image.fromarray(ramp * 2000) if mode == "I;16" else PIL.Image.fromarray(ramp.astype(np.uint8) * 10)
    value, path = encoded(image.convert(mode), "tiff", exif=exif), tmp_path / "image.tiff"
    path.write_bytes(value["bytes"])
    expected = np.asarray(decode_image(value))
    assert expected.shape[:2] == ((6, 4) if orientation > 4 else (4, 6))
    for same in (str(path), {"path": str(path)}, PIL.Image.open(path)):
        assert np.array_equal(decode_image(same), expected)


def test_signed_integers_of_8_bits_are_refused():
    value = encoded(PIL.Image.fromarray(np.zeros((4, 4), np.uint8)), "tiff", tiffinfo={339: 2})
    with pytest.raises(OSError, match="its values are signed integers of 8 bits"):
        decode_image(value)


def gradient(dtype, top):
    return np.linspace(0, top, 256).reshape(16, 16).astype(dtype)


@pytest.mark.parametrize(
    ("array", "format", "pixel_range"),
    [
        (gradient(np.uint16, 65535), "png", None),
        (gradient(np.uint16, 65535), "jpeg2000", None),
        (gradient(np.uint16, 1023), "png", [0, 1023]),
        (gradient(np.uint16, 4095), "tiff", [0, 4095]),
        (gradient(np.int32, 65535), "tiff", [0, 65535]),
        (gradient(np.int32, 4095) - 1024, "tiff", [-1024, 3071]),  # CT
        (gradient(np.float32, 1), "tiff", None),
        (gradient(np.float32, 12) - 5, "tiff", [-5, 7]),
    ],
    ids=lambda value: f"{value.dtype}" if isinstance(value, np.ndarray) else str(value),
)
def test_deep_gray_is_scaled_by_its_format_or_a_setting(array, format, pixel_range):
    expected = np.arange(256).reshape(16, 16)
    value = encoded(PIL.Image.fromarray(array), format) | {"pixel_range": pixel_range}
    assert np.abs(np.asarray(decode_image(value)).astype(int) - expected[..., None]).max() <= 1
    darker = array // 2 if array.dtype != np.float32 else array / 2
    if pixel_range is None:  # not the extremes of a picture
        assert np.asarray(decode_image(encoded(PIL.Image.fromarray(darker), format))).max() in (127, 128)


def deep_tiff(values, bits, sample_format, order="<", photometric=1):
    """4 x 4 gray pixels in a TIFF that Pillow does not write."""
    tags = [(256, 4), (257, 4), (258, bits), (259, 1), (262, photometric), (273, 130), (277, 1), (278, 4)]
    tags += [(279, len(values)), (339, sample_format)]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    body = b"".join(struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    return {"bytes": (head + body).ljust(130, b"\0") + values, "path": None}


RAMP = np.arange(16) * 17  # as 8 bits
# 12 bits a value: 3 bytes hold two values
PACKED = np.packbits(((RAMP * 4095 // 255)[:, None] >> np.arange(11, -1, -1)) & 1)


@pytest.mark.parametrize(
    ("dtype", "values", "pixel_range", "options"),
    [
        ("<u2", RAMP * 257, None, {}),
        (">u2", RAMP * 257, None, {"order": ">"}),
        ("<u2", 65535 - RAMP * 257, None, {"photometric": 0}),  # white is 0
        ("<i2", RAMP * 16 - 1024, [-1024, 3056], {"sample_format": 2}),
        ("<u4", RAMP * 257, [0, 65535], {"bits": 32}),
        (">u1", PACKED, None, {"bits": 12}),
    ],
)
def test_ranges_of_tiffs(dtype, values, pixel_range, options):
    value = deep_tiff(values.astype(dtype).tobytes(), **{"bits": 16, "sample_format": 1} | options)
    assert np.array_equal(np.asarray(decode_image(value | {"pixel_range": pixel_range}))[..., 0].ravel(), RAMP)


@pytest.mark.parametrize("gap", [np.nan, np.inf, -np.inf, -9999, -32768, np.finfo(np.float32).min, 0.5])
def test_gaps_are_black_and_change_nothing_else(gap):
    array = gradient(np.float32, 1)
    whole = np.asarray(decode_image(encoded(PIL.Image.fromarray(array), "tiff"))).copy()
    array[3, 4] = gap
    image = decode_image(encoded(PIL.Image.fromarray(array), "tiff", tiffinfo={42113: "0.5"}))
    whole[3, 4] = 0
    assert np.array_equal(image, whole) and image.info["pixels"] == [1 / 256, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("array", "pixel_range", "message"),
    [
        (gradient(np.float32, 3), None, "its values go from 0 to 3, but for floats, 0 is black and 1 is white"),
        (gradient(np.int32, 4095) - 1024, None, "from -1024 to 3071, but its format has no black and white: set pixel"),
        (gradient(np.float32, 1) * np.nan, [0, 1], "all its pixels are NaN, infinite or no-data values"),
    ],
    ids=["beyond 1", "signed", "nan"],
)
def test_deep_gray_without_a_range_is_refused(array, pixel_range, message):
    with pytest.raises(OSError, match=message):
        decode_image(encoded(PIL.Image.fromarray(array), "tiff") | {"pixel_range": pixel_range})


def png_of(bits, kind, rows, width, transparent=b""):
    """A PNG of rows of bytes."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), bits, kind, 0, 0, 0))
    trns = chunk(b"tRNS", transparent) if transparent else b""
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return {"bytes": b"\x89PNG\r\n\x1a\n" + header + trns + pixels + chunk(b"IEND", b""), "path": None}


def png_of_16_bits(values, kind, transparent=b""):
    return png_of(16, kind, [row.astype(">u2").tobytes() for row in values.reshape(4, 4, -1)], 4, transparent)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_transparency_of_few_bits(bits):
    levels = 2**bits - 1
    gray = (np.arange(16).reshape(2, 8) % (levels + 1)).astype(np.uint8)
    bit_rows = np.unpackbits(gray[..., None], axis=2)[..., -bits:].reshape(2, -1)
    image = decode_image(png_of(bits, 0, [np.packbits(row).tobytes() for row in bit_rows], 8, b"\0\1"))
    assert np.array_equal(np.asarray(image)[..., 0], np.where(gray == 1, 255, gray * (255 // levels)))


def test_color_and_transparency_of_16_bits():
    pixels = np.zeros((16, 3), int)
    pixels[0] = 1000, 2000, 3000
    clear = decode_image(png_of_16_bits(pixels, 2, struct.pack(">HHH", *pixels[0])))
    assert clear.getpixel((0, 0)) == (255, 255, 255) != clear.getpixel((1, 0))
    clear = decode_image(png_of_16_bits(RAMP * 257, 0, b"\0\0"))
    assert np.asarray(clear)[..., 0].ravel().tolist() == [255, *RAMP[1:]]
    color = png_of_16_bits(np.repeat(RAMP * 4, 3), 2)  # 10 bits
    assert decode_image(color).info["pixels"] == [0, 0, 3 * 257, 0, 65535]
    pgm = b"P5 4 4 1023\n" + (RAMP * 4).astype(">u2").tobytes()
    for value in (color, {"bytes": pgm}):
        with pytest.raises(OSError, match="pixel_range cannot apply"):
            decode_image(value | {"pixel_range": [0, 1023]})
    assert np.asarray(decode_image({"bytes": pgm})).max() == 254  # its own range
    eight = encoded(PIL.Image.fromarray(RAMP.astype(np.uint8).reshape(4, 4)))
    assert np.array_equal(decode_image(eight | {"pixel_range": [0, 3]}), decode_image(eight))


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
    with pytest.raises(OSError, match="not an image of the formats"):
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
@settings(max_examples=200, deadline=None)
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
