"""Goals for speed and memory beside what is measured, in one table.

OMP_NUM_THREADS=1 python -m lab.speed.goals --output lab/speed/results/goals_cpu.md
"""

from collections.abc import Iterator

from tqdm.auto import tqdm

from clip_moe.engine.command_line import command
from lab.speed import loader, steps
from lab.speed.page import Output, Rounds, cost, machine, median_of, page, table

# Title, measured ratio, least and most that it should be
Figure = tuple[str, float, float, float]
ANY = float("inf")


def expert_figures(rounds: int) -> Iterator[Figure]:
    """A sparse block over K dense FFNs."""
    for size in ("ViT-B/16", "ViT-L/14"):
        for num_experts in (4, 8):
            ratios = steps.block_ratios(size, 8, num_experts, rounds)
            where = f"{size.removeprefix('ViT-')}, 8 images, top-2 of {num_experts}, over 2 dense FFNs"
            for mode, goal in (("forward", 1.05), ("frozen", 1.05), ("trained", 1.15)):
                yield f"time of a sparse block, {mode}: {where}", ratios["by_device", mode][0], 0, goal
    for num_experts in (4, 8):
        ratios = steps.block_ratios("ViT-B/16", 8, num_experts, rounds, modes=["forward"], capacity_factor=1.0)
        where = f"B/16, 8 images, top-2 of {num_experts}, half of the choices dropped, over 2 dense FFNs"
        yield f"time of a sparse block, forward: {where}", ratios["by_device", "forward"][0], 0, 0.5 * 1.05


def batch_figures(rounds: int) -> Iterator[Figure]:
    *_, memory, time = steps.parts_ratios(steps.loss, 16384, 1024, rounds)
    where = f"loss of 16,384 x {steps.DIMENSIONS} in chunks of 1,024, over the plain one"
    yield f"memory: {where}", memory, 0, 0.125
    yield f"time: {where}", time, 0, 1.3
    _, parts, _, time = steps.parts_ratios(steps.step, 128, 32, rounds)
    yield "time: step of 128 pairs, 32 embedded at a time, over all at once", time, 0, 1.4
    growth = cost(steps.step, 512, 32)["memory"] / median_of(parts, "memory")
    yield "memory: step of 512 pairs, 32 at a time, over one of 128", growth, 0, 1.1


def data_figures(rounds: int) -> Iterator[Figure]:
    names = "loaded, 2 workers", f"indexed in {loader.SHARDS} shards, 2 workers"
    rates = loader.medians(320, rounds, names)
    for name in names:
        yield f"images/s: {name}, over Pillow in a loop", rates[name] / rates[loader.LOOP], 1.6, ANY


def row(title: str, ratio: float, least: float, most: float) -> list[str]:
    goal = f"at least {least:g}" if most == ANY else f"{least:g} to {most:g}" if least else f"at most {most:g}"
    return [title, f"{ratio:.2f}", goal, "yes" if least <= ratio <= most else "missed"]


@command
def goals(*, output: Output = None, rounds: Rounds = 3) -> str:
    """Goals for speed and memory beside what is measured, in one table.

    Each figure is a ratio to a peer or an ideal. Most are of processor time, so threads that wait for each other should
    not count. Larger sizes take longer and have pages of their own: `lab.speed.steps` and `lab.speed.loader`.
    """
    rows = []
    for figure in (figure for part in tqdm(PARTS) for figure in part(rounds)):
        rows.append(row(*figure))
        tqdm.write(" | ".join(rows[-1]))  # at once: a run may be stopped
    about = f"Medians of {rounds} alternating runs, five times as many of FFNs' forwards;{machine()}."
    return page(output, "# Goals", about, table(["", "ratio", "goal", "reached"], rows))


PARTS = (expert_figures, batch_figures, data_figures)

if __name__ == "__main__":
    goals.main()
