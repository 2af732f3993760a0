"""The symbol tasks on a few symbols, and an embedding of one image or text at a time."""

import pytest
import torch
from transformers import AutoModel, AutoProcessor

from clip_moe.evaluation.tasks import TASKS, name_tasks, symbol_tasks


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """The built-in tasks on a few pictures."""
    for name in [name for name in TASKS if name.startswith(("icons_", "names_"))]:
        monkeypatch.delitem(TASKS, name)
    # So many training pictures that all kinds are there
    symbol_parts = symbol_tasks(number=40, retrieval=40, pairs=14, train=1500)
    for name, task in (name_tasks((16,), 16, 16) | symbol_parts).items():
        monkeypatch.setitem(TASKS, name, task)


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
