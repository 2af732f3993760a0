"""Tiny models, the symbol tasks on a few symbols, and the command on small datasets given by columns."""

import dataclasses

import pytest
import torch
from tiny_clip import symbol_processor
from transformers import AutoModel, AutoProcessor, CLIPConfig, CLIPModel

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from clip_moe.evaluation.figures import plt
from clip_moe.evaluation.tasks import TASKS, name_tasks, symbol_tasks


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "dense"
    processor = symbol_processor(16, 32)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = processor.tokenizer
    text = {**tower, "vocab_size": len(tokens), "max_position_embeddings": 16}
    text |= {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    vision = {**tower, "image_size": 32, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sparse(dense):
    folder = dense.with_name("sparse")
    preset = dataclasses.replace(PRESETS["clip_up"], num_experts=4)
    upcycle(CLIPModel.from_pretrained(dense), preset).save_pretrained(folder)
    AutoProcessor.from_pretrained(dense).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """The built-in tasks on a few pictures."""
    for name in [name for name in TASKS if name.startswith(("icons_", "names_"))]:
        monkeypatch.delitem(TASKS, name)
    # So many training pictures that all kinds are there
    symbol_parts = symbol_tasks(number=40, retrieval=40, pairs=14, train=1500)
    for name, task in (name_tasks((16,), 16, 16) | symbol_parts).items():
        monkeypatch.setitem(TASKS, name, task)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn within a test, which are closed at its end."""
    drawn, close = [], plt.close
    monkeypatch.setattr(plt, "close", drawn.append)
    yield drawn
    for figure in drawn:
        close(figure)


def plain_embedding(folder):
    """A function that embeds one image or one text, each once."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor, known = AutoProcessor.from_pretrained(folder), {}

    @torch.no_grad()
    def embed(item):
        key = item if isinstance(item, str) else item.tobytes()
        if key not in known:
            if isinstance(item, str):
                output = model.get_text_features(**processor.tokenizer(item, return_tensors="pt"))
            else:
                output = model.get_image_features(processor.image_processor(item, return_tensors="pt")["pixel_values"])
            known[key] = torch.nn.functional.normalize(output.pooler_output[0], dim=0).numpy()
        return known[key]

    return embed


def with_captions(rows, captions):
    """The rows with other captions."""
    return rows.remove_columns("caption").add_column("caption", captions)


def swapped(items):
    """The same items, each at the place of the one before it."""
    return [*items[1:], items[0]]
