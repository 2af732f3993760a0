"""Outputs of `clip-moe app` against the models themselves; `make space` starts the page and asks it."""

import shutil
import sys

import numpy as np
import PIL.ExifTags
import PIL.Image
import PIL.ImageCms
import PIL.PngImagePlugin
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from tiny_runs import same_weights

from clip_moe.app import commands, page
from clip_moe.app.page import patch_map, sparse_layers
from clip_moe.data.images import decode_image
from clip_moe.data.symbols import SYMBOLS
from clip_moe.evaluation.ensemble import open_model
from clip_moe.evaluation.routing_pictures import route_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with three images, one of them below, and two files that are none."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "below").mkdir()
    pictures = SYMBOLS.load("test", "web", 3)["image"]
    for picture, name in zip(pictures, ("a.png", "below/b.JPG", "c.png"), strict=True):
        picture.save(folder / name)
    for name in ("broken.png", "notes.txt"):
        (folder / name).write_text("no image")
    (folder / "metadata.csv").write_text("file_name,caption\nc.png,a red circle\n")
    return folder


def opened(folder):
    return open_model(folder, None, 4, torch.device("cpu"))


def test_map_of_patches(dense, sparse, images):
    model, image = opened(sparse), images / "a.png"
    assert sparse_layers(model) == [1] and sparse_layers(opened(dense)) == []
    (drawn, masks), routed = patch_map(model, image, 1), route_images(model, [PIL.Image.open(image)], 1)
    assert routed.grid == (2, 2) and drawn.width == drawn.height > 300
    sides = np.array([0.25, 0.75]) * drawn.width
    shown = {(x, y): expert for mask, expert in masks for x in sides for y in sides if mask[int(y), int(x)]}
    best = routed.probabilities[0, 1:].argmax(axis=-1)
    assert shown == {(sides[n % 2], sides[n // 2]): f"expert {expert}" for n, expert in enumerate(best)}
    assert {expert for _, expert in masks} == set(shown.values())


def test_space(sparse, images, tmp_path, monkeypatch):
    """It has the models and images, under their names, and nothing else of their folders."""
    model, beside = shutil.copytree(sparse, tmp_path / "clip_moe"), {"manifest.json", "log.jsonl", "notes.py"}
    for name in beside:
        (model / name).write_text("{}")
    versions = {"torch": "2.13.0+cpu", "gradio": "6.31.0"}
    monkeypatch.setattr(commands, "find_spec", lambda name: True)
    monkeypatch.setattr(page.metadata, "version", lambda name: versions.get(name, "1.2.3"))
    arguments = [str(model), "--baseline", "user/dense", "--examples", str(images)]
    arguments += ["--space", str(tmp_path / "space")]
    commands.app.main(arguments)
    space = tmp_path / "space"
    called = f"app.main(['model/clip_moe', '--baseline', 'user/dense', '--examples', 'examples/{images.name}'])"
    assert (space / "app.py").read_text() == f"from clip_moe.app.commands import app\n\n{called}\n"
    header = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert (header["sdk"], header["sdk_version"], header["app_file"]) == ("gradio", "6.31.0", "app.py")
    assert header["models"] == ["user/dense"]
    assert list(page.captioned(space / "examples" / images.name).values()) == ["a", "b", "a red circle"]
    packages = [Requirement(line) for line in (space / "requirements.txt").read_text().splitlines()]
    assert {package.name for package in packages} == set(page.REQUIREMENTS) and "torch==2.13.0" in map(str, packages)
    copy = space / "model" / "clip_moe"
    assert not beside & {path.name for path in copy.iterdir()} and same_weights(copy, sparse)
    found = {path.relative_to(space / "examples" / images.name).as_posix() for path in space.glob("examples/*/**/*.*")}
    assert found == {"a.png.png", "below/b.JPG.png", "c.png.png", "metadata.jsonl"}
    assert (space / "clip_moe" / "app" / "page.py").is_file() and not list(space.rglob("__pycache__"))
    with pytest.raises(SystemExit, match="already exists"):
        commands.app.main(arguments)


def test_a_space_gets_pixels_alone(tmp_path, caplog):
    """No file that Pillow only writes, nothing behind a link, and nothing that a camera says of a picture."""
    elsewhere, images = tmp_path / "elsewhere", tmp_path / "images"
    (elsewhere / "below").mkdir(parents=True)
    images.mkdir()
    picture = PIL.Image.effect_noise((40, 30), 90).convert("RGB")
    picture.save(elsewhere / "private.png")
    for link, target in (("photo.png", "private.png"), ("below", ".")):
        (images / link).symlink_to(elsewhere / target)
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = 6
    exif.get_ifd(PIL.ExifTags.IFD.GPSInfo)[PIL.ExifTags.GPS.GPSLatitude] = (48.0, 8.0, 0.0)
    profile = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("sRGB")).tobytes()
    picture.save(images / "a.jpg", exif=exif, comment=b"a secret", icc_profile=profile)
    picture.save(images / "b.webp", exif=exif, lossless=True)
    text = PIL.PngImagePlugin.PngInfo()
    text.add_text("Comment", "a secret")
    picture.save(images / "c.png", pnginfo=text, icc_profile=profile, dpi=(72, 72))
    picture.save(images / "d.pdf")
    for name in ("f.eps", "g.png"):
        (images / name).write_text("a secret")
    page._copy_images(images, tmp_path / "space")
    files = {path.relative_to(tmp_path / "space").as_posix(): path for path in (tmp_path / "space").rglob("*.png")}
    assert set(files) == {f"{name}.png" for name in ("a.jpg", "b.webp", "c.png")}
    assert "2 of 5 images" in caplog.text and "photo.png (it is a link)" in caplog.text and "g.png" in caplog.text
    for name, path in files.items():
        with PIL.Image.open(path) as image:
            assert not image.getexif() and not {"comment", "Comment", "icc_profile", "exif", "dpi"} & set(image.info)
            assert np.array_equal(image, decode_image(str(images / name.removesuffix(".png"))))
        assert b"secret" not in path.read_bytes()
    with pytest.raises(ValueError, match="elsewhere/below has no image that can be read, links not counted"):
        page._copy_images(elsewhere / "below", tmp_path / "nothing")


def test_without_gradio(dense, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(SystemExit, match="error: clip-moe app needs gradio: .* `make app` .*: .venv-app/bin"):
        commands.app.main([str(dense)])
    assert page._names(["runs/a/clip_moe", "user/dense"]) == ["clip_moe", "dense"]
    assert page._names(["runs/a/model", "runs/b/model"]) == ["runs/a/model", "runs/b/model"]
