"""Measure a model.

    python -m evaluation.evaluate --model runs/demo/clip_up --tasks glyphs_zero_shot,glyphs_pairs --output-dir scores
    python -m evaluation.evaluate --model FOLDER --tasks retrieval --dataset my/dataset --split test --output-dir scores

Embeddings are computed once for every model and dataset and kept in OUTPUT_DIR/embeddings.
"""

import argparse
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset, Image
from huggingface_hub import snapshot_download
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm.auto import tqdm
from transformers import CLIPModel

from conversion.assemble import ENCODER
from conversion.checkpoints import load_clip, load_mixture
from conversion.files import new_file, one_line_errors, output_folder
from conversion.folders import load_config, loading
from conversion.processors import load_processor
from conversion.provenance import PROCESSOR, WEIGHTS, environment, model_fingerprint, weights_fingerprint
from data.images import decode_image
from data.pairs import present_captions
from data.sources import DataArguments
from evaluation.datasets import (
    BENCHMARKS,
    PRIMARY,
    Benchmark,
    linear_probe_benchmark,
    read_classes,
    retrieval_benchmark,
    zero_shot_benchmark,
)
from evaluation.linear_probe import linear_probe_metrics
from evaluation.pairs import pair_metrics
from evaluation.results import named_folder, require_free, task_name, write_result
from evaluation.retrieval import retrieval_metrics
from evaluation.sentence_encoders import SentenceEncoder, load_encoder
from evaluation.zero_shot import class_embeddings, zero_shot_metrics
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoEModel

logger = logging.getLogger(__name__)


class Embedder:
    """A model's normalized embeddings, computed once and kept on disk.

    Args:
        model: a folder or hub name of a dense or sparse CLIP.
        processor: a folder or hub name with the processor; default: the model's.
        cache_dir: where they are kept, under a hash of model, code, settings and what is embedded. None: nowhere.

    Raises:
        FileNotFoundError: there is no such model, or it has no tokenizer or no image processor.
        ValueError: the batch size is below 1, it is no CLIP, its weights do not fit, embeddings are not finite, or
            a kept file of them is damaged.
    """

    def __init__(
        self,
        model: str | Path,
        cache_dir: Path | None,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        processor: str | Path | None = None,
    ):
        processor = processor or model
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.fingerprint = model_fingerprint(str(model))
        self.processor = load_processor(processor)
        self.source, self.cache_dir = model, cache_dir
        self.batch_size, self.device, self.dtype = batch_size, device, dtype
        # Capacity at inference would make an embedding depend on its batch, hence the batch size.
        versions = environment()["versions"]
        files = [model_fingerprint(str(model), WEIGHTS), model_fingerprint(str(processor), PROCESSOR)]
        self.key = json.dumps([*files, code_hash(), versions, str(dtype), device.type, batch_size])

    @cached_property
    def model(self) -> CLIPModel | CLIPMoEModel:
        """Loaded when something is embedded that was not kept."""
        return load_clip(self.source, dtype=self.dtype).to(self.device)

    def images(self, rows: Dataset, column: str = "image") -> np.ndarray:
        """(rows, D) of the images of a column."""
        rows = rows.select_columns(column)
        if isinstance(rows.features[column], Image):
            rows = rows.cast_column(column, Image(decode=False))
        digest = hashlib.sha256()
        for row in rows:
            value = row[column] if isinstance(row[column], dict) else {"path": row[column]}
            digest.update(value.get("bytes") or Path(value["path"]).read_bytes())

        def embed(start: int) -> torch.Tensor:
            images = [decode_image(value) for value in rows[start : start + self.batch_size][column]]
            pixel_values = self.processor.image_processor(images, return_tensors="pt")["pixel_values"]
            return self.model.get_image_features(pixel_values.to(self.device, self.dtype)).pooler_output

        return self._cached(f"images {digest.hexdigest()}", len(rows), embed)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, D) of texts, cut at the tokenizer's `model_max_length`."""

        def embed(start: int) -> torch.Tensor:
            batch = self.processor.tokenizer(
                list(texts[start : start + self.batch_size]), padding=True, truncation=True, return_tensors="pt"
            )
            inputs = {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}
            return self.model.get_text_features(**inputs).pooler_output

        return self._cached(f"texts {hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()}", len(texts), embed)

    def _cached(self, content: str, number: int, embed: Callable[[int], torch.Tensor]) -> np.ndarray:
        if self.cache_dir is None:
            return self._embed(content, number, embed)
        path = self.cache_dir / f"{hashlib.sha256(f'{self.key} {content}'.encode()).hexdigest()[:32]}.safetensors"
        if path.is_file():
            try:
                embeds = load_file(path)["embeds"]
                if embeds.dtype != np.float32 or embeds.shape[:-1] != (number,) or not np.isfinite(embeds).all():
                    raise ValueError(f"it holds no {number} embeddings that are finite")
            except (SafetensorError, KeyError, ValueError) as error:
                raise ValueError(f"{path} is damaged; delete it, and it is computed again: {error}") from error
            return embeds
        embeds = self._embed(content, number, embed)
        with output_folder(self.cache_dir), new_file(path) as partial:
            save_file({"embeds": embeds}, partial)
        return embeds

    def map(self, compute: Callable[["Embedder"], Any]) -> list[Any]:
        """As `Ensemble.map`: an ensemble of one."""
        return [compute(self)]

    def weights(self, tasks: Sequence[Sequence[str]]) -> np.ndarray:
        """As `Ensemble.weights`."""
        return np.ones((len(tasks), 1), np.float32)

    @torch.no_grad()
    def _embed(self, content: str, number: int, embed: Callable[[int], torch.Tensor]) -> np.ndarray:
        starts = tqdm(range(0, number, self.batch_size), desc=f"embedding {number} {content.split()[0]}", leave=False)
        embeds = torch.cat([embed(start).float().cpu() for start in starts])
        bad = number - int(embeds.isfinite().all(dim=1).sum())
        if bad:
            raise ValueError(
                f"{bad} of {number} {content.split()[0]} have an embedding that is not finite: the weights of "
                f"{self.source} are damaged, or {self.dtype} is too small for them"
            )
        return torch.nn.functional.normalize(embeds, dim=-1).numpy()


class Ensemble:
    """The experts of a `CLIPMoDEModel`, with the weights that a task gives them (MoDE eq. 4).

    The weighted sum of the experts' similarities is one product of embeddings: those of all experts one after the
    other, on one side times the weights. So an ensemble is measured as a CLIP is.

    Args:
        model: a folder or hub name.
        cache_dir, batch_size, device, dtype: of `Embedder`.

    Raises:
        FileNotFoundError, ValueError: see `Embedder` and `load_mixture`.
    """

    def __init__(
        self,
        model: str | Path,
        cache_dir: Path | None,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(str(model)))
        self.folder, self.device, self.fingerprint = folder, device, model_fingerprint(str(folder))
        self.options = (cache_dir, batch_size, device, dtype)
        self.router = load_mixture(folder, max_loaded_experts=1)
        with loading(folder):
            experts = (self.router.expert(number) for number in range(self.router.num_experts))
            self.scales = np.array([expert.logit_scale.exp().item() for expert in experts])
        self._known: dict[str, np.ndarray] = {}

    def map(self, compute: Callable[[Embedder], Any]) -> list[Any]:
        """What is computed with every expert, of which one is in memory at a time."""
        names = self.router.config.experts
        return [compute(Embedder(self.folder / name, *self.options, processor=self.folder)) for name in names]

    def weights(self, tasks: Sequence[Sequence[str]]) -> np.ndarray:
        """(tasks, n) weights of the experts' cosine similarities, from the metadata of each task and the experts' own
        temperatures. Tasks have the same number of texts."""
        if self.router.centers is None:
            weights = np.ones((len(tasks), self.router.num_experts))
        else:
            self._embed({text for task in tasks for text in task} - set(self._known))
            embeds = np.stack([[self._known[text] for text in task] for task in tasks])
            unknown = int((~embeds.any(axis=-1)).sum())
            if unknown:
                logger.warning(
                    "%s: the encoder knows no word of %d texts; a task of such alone gets equal weights",
                    self.folder,
                    unknown,
                )
            weights = self.router.route(torch.as_tensor(embeds), self.encoder.name).numpy()
        weights = weights * self.scales
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    @cached_property
    def encoder(self) -> SentenceEncoder:
        return load_encoder(self.folder / ENCODER, self.device)

    def _embed(self, texts: Iterable[str]) -> None:
        texts = sorted(texts)
        if texts:
            self._known |= dict(zip(texts, self.encoder.encode(texts), strict=True))


def open_model(model: str | Path, *options) -> Embedder | Ensemble:
    """What `measure` measures: see `Embedder` and `Ensemble`."""
    try:
        mixture = load_config(model).model_type == CLIPMoDEConfig.model_type
    except (OSError, ValueError):
        mixture = False  # `Embedder` says what is wrong
    return (Ensemble if mixture else Embedder)(model, *options)


def concatenate(embeds: Sequence[np.ndarray], weights: np.ndarray | None = None) -> np.ndarray:
    """(..., n * D) the embeddings (..., D) of n experts one after the other, each times its weight (..., n)."""
    if weights is not None:
        embeds = [weights[..., number, None] * part for number, part in enumerate(embeds)]
    return np.concatenate(embeds, axis=-1)


def measure(benchmark: Benchmark, model: Embedder | Ensemble) -> dict[str, Any]:
    """The metrics of a benchmark, its number of samples and of those that could not be read, of retrieval the number of
    captions, and of several experts the mean weights that its tasks gave them."""
    rows, skipped = benchmark.load()
    weights, counts = {}, {}
    if benchmark.kind == "zero_shot":
        prompts = [template.format(name) for name in benchmark.classes for template in benchmark.templates]
        shape = (len(benchmark.classes), len(benchmark.templates), -1)
        images, classes = zip(
            *model.map(lambda e: (e.images(rows), class_embeddings(e.texts(prompts).reshape(shape)))), strict=True
        )
        weights["classes"] = model.weights([list(benchmark.classes)])
        labels = np.array([list(benchmark.classes).index(name) for name in rows["caption"]])
        metrics = zero_shot_metrics(concatenate(images), concatenate(classes, weights["classes"]), labels)
    elif benchmark.kind == "retrieval":
        captions = [present_captions(caption) for caption in rows["caption"]]
        image_of_text = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions])
        corpus = [text for texts in captions for text in texts]
        counts["num_captions"] = len(corpus)
        images, texts = zip(*model.map(lambda e: (e.images(rows), e.texts(corpus))), strict=True)
        weights["corpus"], weights["queries"] = (
            model.weights([corpus]),
            model.weights([[text] for text in corpus]),
        )
        metrics = retrieval_metrics(
            concatenate(images),
            concatenate(texts, weights["corpus"]),
            image_of_text,
            query_embeds=concatenate(texts, weights["queries"]),
        )
    elif benchmark.kind == "linear_probe":
        train_rows, train_skipped = benchmark.load_train()
        train_images, images = zip(*model.map(lambda e: (e.images(train_rows), e.images(rows))), strict=True)
        labels = [[list(benchmark.classes).index(name) for name in part["caption"]] for part in (train_rows, rows)]
        metrics = linear_probe_metrics(
            concatenate(train_images), labels[0], concatenate(images), labels[1], device=model.device
        )
        skipped += train_skipped
    else:
        pairs = list(zip(rows["caption_0"], rows["caption_1"], strict=True))
        images, texts = zip(
            *model.map(
                lambda e: (
                    np.stack([e.images(rows, f"image_{side}") for side in range(2)], axis=1),
                    np.stack([e.texts(list(rows[f"caption_{side}"])) for side in range(2)], axis=1),
                )
            ),
            strict=True,
        )
        weights["pairs"] = model.weights(pairs)
        metrics = pair_metrics(
            concatenate(images), concatenate(texts, weights["pairs"][:, None]), list(rows["attribute"])
        )
    result = {"metrics": metrics, "num_samples": len(rows), **counts, "num_skipped": skipped}
    if isinstance(model, Ensemble):
        result["routing_weights"] = {name: of_tasks.mean(axis=0).tolist() for name, of_tasks in weights.items()}
    return result


def evaluate_model(
    model: str | Path,
    tasks: Sequence[str],
    output_dir: str | Path,
    *,
    name: str | None = None,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    benchmarks: dict[str, Benchmark] | None = None,
) -> list[dict]:
    """Measure a model on tasks; each result is also written to `output_dir/TASK--NAME.json`.

    The task of a result on data given by columns is called after the data: see `evaluation.results.task_name`.

    Args:
        model: a folder or hub name.
        tasks: keys of `benchmarks`.
        name: what the model is called in reports; default: its folder's or repository's name.
        device: default: the accelerator, if there is one.
        benchmarks: default: those of `evaluation.datasets`.

    Returns:
        One result a task: the metrics and all it takes to know what they mean.

    Raises:
        OSError: the output folder cannot be made.
        ValueError: a task that is unknown or given twice, a device that cannot compute, an empty name, or a result of
            other weights, another dtype or another protocol under the same name; else as `Embedder`.
    """
    benchmarks = BENCHMARKS if benchmarks is None else benchmarks
    require_known(tasks, benchmarks)
    set_seed(0)
    if name is None:
        name = (Path(model).resolve() if Path(model).is_dir() else Path(model)).name
    if not name.strip():
        raise ValueError(f"a model needs a name, not {name!r}")
    output_dir, device = Path(output_dir), usable_device(device)
    opened = open_model(model, output_dir / "embeddings", batch_size, device, dtype)
    of_model = {"fingerprint": opened.fingerprint, "weights": weights_fingerprint(str(model))}
    of_model |= {"dtype": str(dtype).removeprefix("torch.")}
    names = {
        task: {"model": name, "task": task_name(task, benchmarks[task].data), "protocol": benchmarks[task].protocol}
        for task in tasks
    }
    for task in tasks:  # before the work
        require_free(names[task] | of_model, output_dir)
    results = []
    with output_folder(output_dir):
        for task in tasks:
            benchmark = benchmarks[task]
            result = {
                **names[task],
                "title": benchmark.title,
                "data": benchmark.data,
                **measure(benchmark, opened),
                "primary": PRIMARY[benchmark.kind],
                "source": str(model),
                **of_model,
                "device": device.type,
                "batch_size": batch_size,
                "seed": 0,
                **environment(),
            }
            write_result(result, output_dir)
            results.append(result)
    return results


def parse_tasks(text: str) -> list[str]:
    """The tasks of a command line, between commas."""
    return [task.strip() for task in text.split(",")]


def require_known(tasks: Sequence[str], benchmarks: dict[str, Benchmark]) -> None:
    """Raises a ValueError for a task that is none of the benchmarks, or given twice."""
    unknown = [task for task in tasks if task not in benchmarks]
    if unknown:
        raise ValueError(
            f"unknown task {', '.join(task or repr(task) for task in unknown)}; there are {', '.join(benchmarks)}"
        )
    repeated = [task for task, count in Counter(tasks).items() if count > 1]
    if repeated:
        raise ValueError(f"these tasks occur twice: {', '.join(repeated)}")


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device, or the accelerator if there is one.

    Raises:
        ValueError: it is not there, or does not compute.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        number = torch.ones(1, device=device) + 1
        number.item()  # a meta tensor has none
        return number.device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"cannot compute on the device {device}: {error}") from error


def code_hash() -> str:
    """Of the code that makes embeddings, as it is on disk: a commit would not tell two uncommitted changes apart."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in [*sorted((root / "modeling_clip_moe").glob("*.py")), Path(__file__), root / "data" / "images.py"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder or hub name of a CLIPModel, CLIPMoEModel or CLIPMoDEModel"
    )
    known = ", ".join(BENCHMARKS)
    parser.add_argument(
        "--tasks", required=True, help=f"{known}; or with --dataset: retrieval, zero_shot, linear_probe"
    )
    parser.add_argument("--output-dir", required=True, type=named_folder)
    parser.add_argument("--name", help="what reports call the model (default: its folder's name)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", help="default: the accelerator, if there is one")
    columns = parser.add_argument_group("any dataset: the tasks retrieval, zero_shot and linear_probe")
    columns.add_argument("--dataset", help="whatever a recipe's data.source may be")
    columns.add_argument("--split", default="test")
    columns.add_argument("--train-split", default="train", help="for linear_probe")
    columns.add_argument("--num-samples", type=int)
    columns.add_argument("--image-column", default="image")
    columns.add_argument("--image-root")
    columns.add_argument("--caption-column", default="caption", help="texts or lists of texts, for retrieval")
    columns.add_argument(
        "--captions-per-line", action="store_true", help="each line of a text is a caption, as CLIP_benchmark's shards"
    )
    columns.add_argument("--label-column", default="label", help="for zero_shot and linear_probe")
    columns.add_argument(
        "--classes", type=Path, help="file with a class's name on each line, for zero_shot and linear_probe"
    )
    columns.add_argument("--templates", nargs="+", default=["a photo of a {}."], help="for zero_shot")
    args = parser.parse_args(argv)
    with one_line_errors():
        tasks = parse_tasks(args.tasks)
        results = evaluate_model(
            args.model,
            tasks,
            args.output_dir,
            name=args.name,
            batch_size=args.batch_size,
            device=args.device,
            dtype=getattr(torch, args.dtype),
            benchmarks=BENCHMARKS | _column_benchmarks(args, tasks),
        )
    for result in results:
        numbers = ", ".join(f"{metric} {value:.1%}" for metric, value in result["metrics"].items())
        print(f"{result['task']} ({result['num_samples']} samples, {result['num_skipped']} skipped): {numbers}")


def _column_benchmarks(args: argparse.Namespace, tasks: list[str]) -> dict[str, Benchmark]:
    wanted = [task for task in ("retrieval", "zero_shot", "linear_probe") if task in tasks]
    if wanted and not args.dataset:
        raise ValueError(f"the task {wanted[0]} needs --dataset")
    benchmarks = {}
    for task in wanted:
        try:
            arguments = DataArguments(
                source=args.dataset,
                split=args.split,
                num_samples=args.num_samples,
                image_column=args.image_column,
                image_root=args.image_root,
                caption_column=args.caption_column if task == "retrieval" else args.label_column,
                captions_per_line=args.captions_per_line and task == "retrieval",
            )
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
            raise ValueError(f"--dataset {args.dataset}: {'; '.join(problems)}") from None
        if task == "retrieval":
            benchmarks[task] = retrieval_benchmark(arguments)
        else:
            classes = read_classes(args.classes) if args.classes else None
            if task == "zero_shot":
                benchmarks[task] = zero_shot_benchmark(arguments, args.templates, classes)
            else:
                benchmarks[task] = linear_probe_benchmark(arguments, args.train_split, classes)
    return benchmarks


if __name__ == "__main__":
    main()
