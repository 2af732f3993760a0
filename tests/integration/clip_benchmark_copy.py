"""Requirements of CLIP_benchmark's command: a data set in its layout, and torchvision."""

import io
import os
import sys
from pathlib import Path

from tiny_sources import write_shard

from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS


def save_benchmark(folder, captions=False):
    """A data set in CLIP_benchmark's layout: 60 symbols with their kinds, or with two captions each, in two shards."""
    (folder / "test").mkdir(parents=True)
    rows = SYMBOLS.load("test", "detailed", 60)
    web = SYMBOLS.load("test", "web", 60)["caption"]
    for shard in range(2):
        members = []
        for number in range(shard * 30, shard * 30 + 30):
            file = io.BytesIO()
            rows[number]["image"].save(file, "png")
            members.append((f"{number:03}.png", file.getvalue()))
            text = f"{rows[number]['caption']}\n{web[number]}"
            label = ("txt", text) if captions else ("cls", str(symbols.KINDS.index(rows[number]["kind"])))
            members.append((f"{number:03}.{label[0]}", label[1].encode()))
        write_shard(folder / "test" / f"{shard}.tar", members)
    (folder / "test" / "nshards.txt").write_text("2")
    if captions:
        (folder / "dataset_type.txt").write_text("retrieval")
    else:
        (folder / "classnames.txt").write_text("\n".join(symbols.KINDS))
        (folder / "zeroshot_classification_templates.txt").write_text("a picture of a {c}\na small {c}")


def clip_benchmark_path(folder):
    """Value of PYTHONPATH for CLIP_benchmark's command, which needs a file that is written into `folder`.

    torchvision lies in a folder of its own: where torch is a CPU build, the one on PyPI cannot be imported whole, and
    transformers would try.
    """
    module = "torchvision._meta_registrations"  # of its compiled operators, which nothing here calls
    (folder / "sitecustomize.py").write_text(
        f"import sys, types\nsys.modules[{module!r}] = types.ModuleType({module!r})\n"
    )
    return os.pathsep.join([str(folder), str(Path(sys.prefix) / "clip-benchmark")])
