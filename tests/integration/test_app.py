"""The page of `examples.app` in a headless Chromium: `make test-app`."""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import pytest
import torch

pytest.importorskip("gradio", reason="gradio takes no Pillow 13: make test-app has an environment for it")
pytest.importorskip("PyQt6.QtWebEngineWidgets", reason="no Chromium: make test-app installs one")

from chromium import Chromium  # noqa: E402

from data import symbols  # noqa: E402
from evaluation.ensemble import open_model  # noqa: E402
from examples.app import ImageSearch, build_page, label_scores  # noqa: E402

SPARSE, DENSE = "<b>sparse</b>", "dense"
UPLOAD, LABELS, COMPARE = "#image input[type=file]", "#labels textarea", "document.querySelector('#compare').click()"
SCORES = "return [...document.querySelectorAll('.scores')].map(part => part.innerText)"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, image in enumerate(symbols.load("test", "web", 6)["image"]):
        image.save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def models(source):
    device = torch.device("cpu")
    folders = {SPARSE: source, DENSE: "training/symbol_clip"}
    return {name: open_model(folder, None, 8, device) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def address(models, images):
    page = build_page(models, ImageSearch(models, images))
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    yield address
    page.close()


@pytest.fixture(scope="module")
def chromium():
    return Chromium(1280, 1100)


@pytest.fixture
def page(chromium, address):
    chromium.open(address)
    chromium.wait("document.querySelector('#compare')")
    return chromium


def test_labels(page, models, images):
    image, labels = images / "0.png", "a red circle\n<i>seven</i>\na star"
    page.choose(UPLOAD, image, "image/png")
    page.wait("document.querySelector('#image img')")
    page.type(LABELS, labels)
    page.run(COMPARE)
    page.wait("document.querySelector('#map img')")
    for name, shown in zip((SPARSE, DENSE), page.run(SCORES), strict=True):
        assert shown.startswith(name)
        for label, score in label_scores(models[name], image, labels, "a photo of a {}.").items():
            assert f"{label}\n{score:.0%}" in shown.replace("\n\n", "\n")
    before = page.run("return document.querySelector('#map img').src")
    page.run("document.querySelector('#layer input').focus()")
    page.wait("document.querySelector('#layer [role=option], [role=listbox] [role=option]')")
    page.run(
        "document.querySelector('[role=listbox] [role=option]')"
        ".dispatchEvent(new MouseEvent('mousedown', {bubbles: true}))"
    )
    page.wait(f"document.querySelector('#map img').src != {before!r}")


@pytest.mark.parametrize(
    ("content", "labels", "message"),
    [
        (b"no image", "a star", "this image cannot be read: it is no image of the formats"),
        (None, "a star", "there is no image: drop one first"),
        ("image", "  ", "there are no labels: type some, one a line"),
    ],
)
def test_messages(page, images, tmp_path, content, labels, message):
    if content is not None:
        (tmp_path / "file.png").write_bytes((images / "0.png").read_bytes() if content == "image" else content)
        page.choose(UPLOAD, tmp_path / "file.png", "image/png")
        page.wait("document.querySelector('#image img')")
    page.type(LABELS, labels)
    page.run(COMPARE)
    page.wait(f"document.body.innerText.includes({message!r})")
    assert not page.run("return Boolean(document.querySelector('#map img'))")


def test_search(page, models, images):
    page.run("[...document.querySelectorAll('[role=tab]')].find(tab => tab.innerText == 'Search').click()")
    page.wait("document.querySelector('#query textarea, #query input')")
    page.type("#query textarea, #query input", "a red circle")
    page.run("document.querySelector('#query button').click()")
    page.wait("document.querySelectorAll('.found img').length == 12")
    best = ImageSearch(models, images).find(DENSE, "a red circle")[0].name
    assert best in page.run("return document.querySelectorAll('.found')[1].innerText")
