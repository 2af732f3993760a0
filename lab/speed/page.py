"""Shared parts of the benchmarks: costs in processes of their own, and the page that is printed."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled
from pydantic import Field
from transformers.utils.logging import disable_progress_bar

from clip_moe.engine.files import write_text
from clip_moe.engine.markdown import markdown_table
from clip_moe.engine.program import peak_memory, reset_peak_memory
from clip_moe.engine.provenance import device_name
from clip_moe.evaluation.speed import wait_for

Result = TypeVar("Result")
CPU = torch.device("cpu")
# Options of all benchmarks
Output = Annotated[Path | None, Field(description="markdown file to write besides printing")]
Rounds = Annotated[int, Field(description="in each of which every case has its turn")]


def median_ratio(numbers: Iterable[float], reference: Iterable[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(numbers, reference, strict=True))


def median_of(results: Iterable[Mapping[str, float]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the processor on a CPU, where other programs would disturb the clock, and by the clock elsewhere."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait_for(device)
    start = clock()
    call()
    wait_for(device)
    return clock() - start


def cost(prepare: Callable[..., Callable[[], Any]], *arguments: object) -> dict[str, Any]:
    """Cost of calling `prepare(*arguments)()`, measured in a new process: `cpu` seconds of the processor, bytes of
    `memory` on top of what the process held before, at most (on a GPU, all that was allocated), and the `result`."""
    return in_own_process(_cost, prepare, arguments)


def in_own_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a new process, which has its own memory. It draws no bars where this one draws none."""
    quiet = disable_progress_bar if are_progress_bars_disabled() else None
    # A fork of a process that has used OpenMP would wait for threads that are not there
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=quiet) as process:
        others = set(active_children())
        try:
            return process.submit(function, *arguments).result()
        except BaseException:  # also Ctrl-C: it may compute for long
            for child in set(active_children()) - others:
                child.kill()
            raise


def _cost(prepare: Callable[..., Callable[[], Any]], arguments: tuple) -> dict[str, Any]:
    call = prepare(*arguments)
    reset_peak_memory(CPU)
    before, processor = peak_memory(CPU), time.process_time()
    result = call()
    cpu = time.process_time() - processor
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"cpu": cpu, "memory": allocated or peak_memory(CPU) - before, "result": result}


def machine(device: torch.device | str = "cpu") -> str:
    """The device and the versions, for a page of results."""
    device = torch.device(device)
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{device_name(device)}{threads}, torch {torch.__version__}, transformers {transformers.__version__}"


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    return markdown_table([*header], [[str(cell) for cell in row] for row in rows])


def page(output: Path | None, *parts: str) -> str:
    """The parts of a page as one text, which is also written to a file if there is to be one."""
    text = "\n\n".join(parts)
    if output is not None:
        write_text(output, text)
    return text
