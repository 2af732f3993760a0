"""The page of `clip-moe app`, in gradio: what models say of an image, and which experts take which patches."""

import html
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import yaml
from datasets import Dataset
from matplotlib.colors import to_hex

import modeling_clip_moe
from clip_moe.conversion.processors import own_template
from clip_moe.conversion.publishing.bundle import copy_model
from clip_moe.data.image_folders import PICTURES as ENDINGS
from clip_moe.data.image_folders import open_folder
from clip_moe.data.images import decode_image
from clip_moe.data.texts import present_captions
from clip_moe.engine.files import new_folder
from clip_moe.engine.messages import join_names
from clip_moe.evaluation.embedder import Embedder, usable_device
from clip_moe.evaluation.ensemble import Ensemble, open_model
from clip_moe.evaluation.measures import Embeds
from clip_moe.evaluation.own_data import is_template
from clip_moe.evaluation.routing_pictures import expert_colors, route_images

logger = logging.getLogger(__name__)

BATCH_SIZE = 64
TITLE = "CLIP-MoE"
SENTENCE = "A sparse CLIP says which label fits a picture, and which of its experts computed each part of it."
SHOWN_SIDE = 512  # pixels of an image
GALLERY = {"buttons": [], "height": "max-content", "elem_classes": "pictures"}
# Gallery has as many columns on all screens, and cuts captions
STYLE = """
.pictures .grid-container { grid-template: none / repeat(auto-fill, minmax(8rem, 1fr)) }
.pictures .caption-label { white-space: normal }
"""
# The folder of a bundled model -> pictures that the page opens on, and what the model knows
PICTURES = {"name_clip_moe": str(Path(__file__).parent / "pictures")}
WORLDS = {"name_clip_moe": "It knows the coats of arms of 4,096 invented towns, in any new drawing, and nothing else."}
# On a phone the answer is below the fold
SCROLL = """() => {
  if (matchMedia("(max-width: 48rem)").matches) document.querySelector(".scores").scrollIntoView({behavior: "smooth"});
}"""
SECONDS_KEPT = 3600  # what visitors upload
# Requirements of a Space: folders of this repository that the page runs on, and packages
ROOMS = ("engine", "data", "conversion", "evaluation", "app")
REQUIREMENTS = """
accelerate datasets filelock huggingface_hub markdown-it-py matplotlib pillow psutil pydantic pyyaml
safetensors scikit-learn threadpoolctl torch tqdm transformers
""".split()


def label_scores(model: Embeds, image: str | Path | None, labels: str | None, template: str | None) -> dict[str, float]:
    """The probability of each label, by the model's own temperature.

    Args:
        image: its path.
        labels: one a line; each counts once.
        template: a text with a {} for a label.
    """
    rows = Dataset.from_dict({"image": [require_image(image)]})
    names = list(dict.fromkeys(line.strip() for line in (labels or "").splitlines() if line.strip()))
    if not names or not is_template(template or ""):
        raise ValueError("type labels, one a line, and a template with one {} for the label")
    prompts = [template.format(name) for name in names]
    cosines = np.concatenate(model.map(lambda e: e.images(rows) @ e.texts(prompts).T))  # (experts, labels)
    weights = model.weights([names], [template])[0]
    image_weights = model.image_weights(rows)
    weights = weights if image_weights is None else weights * image_weights[0]
    # They have the experts' temperatures as factors. Without these, weights sum to 1
    temperatures = model.scales if isinstance(model, Ensemble) else np.array([model.model.logit_scale.exp().item()])
    logits = weights @ cosines / (weights / temperatures).sum()
    return dict(zip(names, torch.from_numpy(logits).softmax(dim=0).tolist(), strict=True))


def require_image(image: str | Path | None) -> str:
    """The path of an image that can be read. Raises a ValueError if it cannot, or if there is none."""
    try:
        decode_image(str(image or ""))
    except OSError as error:
        raise ValueError(f"drop an image that can be read: {error}") from error
    return str(image)


def sparse_layers(model: Embeds) -> list[int]:
    """The sparse layers of the vision tower, from 0."""
    return [] if isinstance(model, Ensemble) else sorted(getattr(model.model.config.vision_config, "moe_layers", ()))


def patch_map(
    model: Embedder, image: str | Path | None, layer: int
) -> tuple[PIL.Image.Image, list[tuple[np.ndarray, str]]]:
    """An image, and for each expert a mask of the patches for which the router likes it best."""
    routed = route_images(model, [decode_image(require_image(image))], layer)
    scale = max(1, SHOWN_SIDE // max(routed.pixels.shape[1:3]))
    side = scale * routed.patch_size
    pixels = routed.pixels[0].repeat(scale, axis=0).repeat(scale, axis=1)
    first = routed.probabilities[0, 1:].argmax(axis=-1).reshape(routed.grid).repeat(side, axis=0).repeat(side, axis=1)
    masks = []
    for expert in np.unique(first):
        mask = np.zeros(pixels.shape[:2])
        mask[: len(first), : len(first[0])] = 0.8 * (first == expert)
        masks.append((mask, f"expert {expert}"))
    return PIL.Image.fromarray((255 * pixels).round().astype(np.uint8)), masks


def captioned(folder: Path) -> dict[Path, str]:
    """The images of a folder and of those below that can be read, and what is said of each there, or else the name of
    its file. What is reached by a link is left out, since it may be anything: a Space would publish it."""
    said: dict[str, Any] = {}
    readable, left_out = [], []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS):
        fault: object = "it is a link" if path.is_symlink() else None
        try:
            decode_image(str(path))
        except OSError as error:
            fault = fault or error
        if fault:
            left_out.append(f"{path.relative_to(folder)} ({fault})")
        else:
            readable.append(path)
    if not readable:
        raise ValueError(f"{folder} has no image that can be read, links not counted")
    if left_out:
        found = len(readable) + len(left_out)
        logger.warning("%d of %d images in %s are left out: %s", len(left_out), found, folder, join_names(left_out))
    for rows in open_folder(str(folder)).values():
        if {"image", "caption"} <= set(rows.column_names):
            said |= dict(zip(rows["image"], rows["caption"], strict=True))
    return {path: " · ".join(present_captions(said.get(os.path.abspath(path)))) or path.stem for path in readable}


# Computing twice at once gains nothing
ONE_AT_A_TIME = {"concurrency_id": "model", "concurrency_limit": 1}


def build_page(models: Mapping[str, Embeds], examples: Mapping[Path, str]):
    """The page as `gradio.Blocks`.

    Args:
        models: name -> model, beside each other in this order. The map is of the first one that is sparse.
        examples: pictures to try and their names; the page opens with the answer for the first one.
    """
    import gradio as gr

    layers = {name: sparse_layers(model) for name, model in models.items()}
    mapped = next((name for name in models if layers[name]), None)

    def compare(image: str | None, labels: str | None, template: str | None, layer: int | None = None) -> list[Any]:
        scores = [label_scores(model, image, labels, template) for model in models.values()]
        return scores if layer is None else [*scores, patch_map(models[mapped], image, layer)]

    def compare_for_page(*inputs: Any) -> Any:
        outputs = compare(*inputs)
        return outputs if len(outputs) > 1 else outputs[0]  # Gradio takes one output without a list

    def choose(event: gr.SelectData) -> str:
        return pictures[event.index]

    pictures = [str(path) for path in examples]
    names = "\n".join(examples.values())
    model_template = own_template(next(iter(models.values())).tokenizers[0])
    shown_layer = None if mapped is None else layers[mapped][-1]
    # Computed before the page is there: its first visitor sees an answer and not a spinner
    answers = compare(pictures[0], names, model_template, shown_layer) if pictures else [None] * (len(models) + 1)
    options = {"analytics_enabled": False, "delete_cache": (SECONDS_KEPT, SECONDS_KEPT)}
    with gr.Blocks(title=TITLE, **options) as page:
        gr.Markdown(" ".join([f"# {TITLE}\n{SENTENCE}", *(WORLDS[name] for name in models if name in WORLDS)]))
        with gr.Row():
            with gr.Column():
                options = {"type": "filepath", "sources": ["upload", "clipboard"]}
                image = gr.Image(next(iter(pictures), None), label="Image", elem_id="image", **options)
                # Else Gradio opens the file before we do, and of one that it cannot read it only says "Error"
                image.preprocess = lambda upload: upload and upload.path
                labels = gr.Textbox(names, label="Labels, one a line", lines=5, elem_id="labels")
                template = gr.Textbox(model_template, label="Template, with {} for the label", elem_id="template")
                ask = gr.Button("Compare", variant="primary", elem_id="compare")
                if examples:
                    shown = [decode_image(path) for path in pictures]
                    for picture in shown:
                        picture.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
                    captions = list(zip(shown, examples.values(), strict=True))
                    gallery = gr.Gallery(captions, show_label=False, allow_preview=False, **GALLERY)
            with gr.Column():
                with gr.Row():
                    labeled = zip(models, answers, strict=False)
                    outputs = [gr.Label(answer, label=name, elem_classes="scores") for name, answer in labeled]
                inputs = [image, labels, template]
                if mapped is not None:
                    label = f"The experts of each patch in {mapped}, sparse layer"
                    layer = gr.Dropdown(layers[mapped], value=shown_layer, label=label, elem_id="layer")
                    colors = map(to_hex, expert_colors(models[mapped].model.config.vision_config.num_experts))
                    colors = {f"expert {expert}": color for expert, color in enumerate(colors)}
                    options = {"color_map": colors, "height": 400, "show_label": False, "buttons": [], "elem_id": "map"}
                    experts = gr.AnnotatedImage(answers[-1], **options)
                    draw = show_errors(partial(patch_map, models[mapped]))
                    layer.input(draw, [image, layer], experts, **ONE_AT_A_TIME)
                    inputs, outputs = [*inputs, layer], [*outputs, experts]
        # An error would cover each output, too, if progress were shown on them
        event = {"fn": show_errors(compare_for_page), "inputs": inputs, "outputs": outputs, "show_progress_on": ask}
        ask.click(**event, **ONE_AT_A_TIME, api_name="compare").then(None, js=SCROLL)
        if examples:
            gallery.select(choose, None, image).then(**event, **ONE_AT_A_TIME).then(None, js=SCROLL)
    return page


def show_errors(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with errors as messages on the page, which would take them for HTML."""
    import gradio as gr

    def shown(*inputs: Any) -> Any:
        try:
            return compute(*inputs)
        except (ValueError, OSError) as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from error

    return shown


def write_space(output: Path, model: str, baseline: str | None, examples: str | None) -> None:
    """A Space that shows the page: `README.md`, `requirements.txt`, `app.py`, the code, and models and pictures that
    are in folders here, without what else lies there."""
    with new_folder(output) as space:
        _copy_code(Path(modeling_clip_moe.__file__).parent, space / "modeling_clip_moe")
        package = Path(__file__).parents[1]
        for room in ROOMS:
            _copy_code(package / room, space / "clip_moe" / room)
        shutil.copy(package / "__init__.py", space / "clip_moe")
        arguments = [_carried(model, space / "model", copy_model)]
        if baseline:
            arguments += ["--baseline", _carried(baseline, space / "baseline", copy_model)]
        if examples:
            arguments += ["--examples", _carried(examples, space / "examples", _copy_images)]
        settings = {"title": TITLE, "sdk": "gradio", "sdk_version": metadata.version("gradio")}
        settings |= {"python_version": ".".join(platform.python_version_tuple()[:2])}
        settings |= {"app_file": "app.py", "license": "apache-2.0", "tags": ["clip", "mixture-of-experts"]}
        if on_hub := [name for name in (model, baseline) if name and not Path(name).is_dir()]:
            settings["models"] = on_hub
        files = {
            "README.md": f"---\n{yaml.safe_dump(settings, sort_keys=False)}---\n{SENTENCE} Made by `clip-moe app`.\n",
            # Without +cpu and the like, which PyPI does not have
            "requirements.txt": "".join(f"{n}=={metadata.version(n).partition('+')[0]}\n" for n in REQUIREMENTS),
            "app.py": f"from clip_moe.app.commands import app\n\napp.main({arguments!r})\n",
        }
        for name, text in files.items():
            (space / name).write_text(text, encoding="utf-8")


def _carried(source: str, parent: Path, copy: Callable[[Path, Path], Any]) -> str:
    """The Hub name itself, or the place of a copied folder within a Space, under its own name."""
    if not Path(source).is_dir():
        return source
    target = parent / Path(source).resolve().name
    copy(Path(source), target)
    return f"{parent.name}/{target.name}"


def _copy_code(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*.py")):  # not what somebody keeps beside it
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def _copy_images(source: Path, target: Path) -> None:
    """Write the pixels of a folder's images into PNG files, `a.jpg.png` for `a.jpg`, without metadata such as where
    they were taken, and their captions into `metadata.jsonl`."""
    lines = []
    for path, caption in captioned(source).items():
        image = decode_image(str(path))
        image.info.clear()  # comments and color profiles, which Pillow would write
        copy = target / path.relative_to(source).with_name(f"{path.name}.png")
        copy.parent.mkdir(parents=True, exist_ok=True)
        image.save(copy)
        lines.append(json.dumps({"file_name": copy.relative_to(target).as_posix(), "caption": caption}))
    (target / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _names(sources: list[str]) -> list[str]:
    """The last parts of folders or Hub names, or all of them if these are alike."""
    names = [Path(source).resolve().name for source in sources]
    return names if len(set(names)) == len(names) else sources


def open_page(model: str, baseline: str | None, examples: str | None) -> None:
    """Opens the page in the browser; the arguments are those of `clip-moe app`."""
    sources, device = list(dict.fromkeys(filter(None, [model, baseline]))), usable_device(None)
    named = zip(_names(sources), sources, strict=True)
    models = {name: open_model(source, None, BATCH_SIZE, device) for name, source in named}
    build_page(models, captioned(Path(examples)) if examples else {}).launch(ssr_mode=False, css=STYLE)
