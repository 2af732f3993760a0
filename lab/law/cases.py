"""Cases of the law of when experts pay: models, their steps and rates, and the command that runs them.

    python -m lab.law.cases names 1024 8 1280 --experts 8

prints the command of one, whose run `lab.law.points` reads.

A case is a number of facts of a world, a width, and a budget: the multiply-adds of a dense model of that width that
sees each fact so many times. All models of a case train for these. Their rate is 0.256 / width.
"""

import shlex
from dataclasses import dataclass, replace
from functools import cache

from transformers import CLIPConfig

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_config
from clip_moe.engine.command_line import command
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model
from lab.worlds import SOURCES

BATCH = 512
RATE = 0.256  # over the width
# Pixels a side of a picture and of a patch. In patches of 16, no molecules were learned
SIZES = {"names": (16, 8), "characters": (32, 8), "icons": (32, 8), "molecules": (64, 8)}
# Prefix of a set of kinds
KINDS = {"icons": "brands "}


@dataclass(frozen=True)
class Case:
    """A model to train. Steps follow from `budget_width`: as many multiply-adds as a dense model so wide needs for
    `exposures` of each fact."""

    world: str
    facts: int
    width: int
    exposures: int
    experts: int = 0  # 0: dense
    experts_per_token: int = 2
    budget_width: int | None = None  # None: the width
    seed: int = 0
    rate: float = 1.0  # times the rule's
    parts: int = 1  # experts are 1/parts as wide as the FFN

    @property
    def name(self) -> str:
        parts = [self.world, self.facts, f"w{self.width}", f"x{self.exposures}"]
        parts += [f"e{self.experts}k{self.experts_per_token}"] if self.experts else ["dense"]
        parts += [f"p{self.parts}"] if self.parts > 1 else []
        parts += [f"b{self.budget_width}"] if self.budget_width not in (None, self.width) else []
        parts += [f"r{self.rate:g}"] if self.rate != 1 else []
        return "_".join(map(str, [*parts, f"s{self.seed}"]))


@cache
def costs(
    world: str,
    width: int,
    experts: int,
    experts_per_token: int,
    parts: int = 1,
    length: int = 32,
    ffn: int | None = None,
) -> tuple[int, int]:
    """Multiply-adds of a picture and a text of a length in tokens, and parameters of the layers; `ffn`: its width."""
    image_size, patch_size = SIZES[world]
    tower = {"hidden_size": width, "intermediate_size": ffn or 4 * width, "num_hidden_layers": 2}
    tower["num_attention_heads"] = 1
    tower["projection_dim"] = width
    config = CLIPConfig(
        text_config={
            **tower,
            "max_position_embeddings": length,
            "vocab_size": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        vision_config={**tower, "image_size": image_size, "patch_size": patch_size},
        projection_dim=width,
    )
    if experts:
        preset = PRESETS["clip_up"]
        changes = {"num_experts": experts, "num_experts_per_tok": experts_per_token, "capacity_factor": None}
        changes["moe_intermediate_size"] = f"1/{parts}"
        config = sparse_config(config, replace(preset, **changes))
    model = meta_model(config)
    counted = count_multiply_adds(model)
    return counted["image"] + counted["text"], count_parameters(model)["layers"]


def batch_size(case: Case) -> int:
    return min(BATCH, case.facts)  # no fact twice in a batch


def steps(case: Case) -> tuple[int, int]:
    """Steps of the seed model, a fifth of the budget, and of the model itself."""
    base = costs(case.world, case.budget_width or case.width, 0, 2)[0]
    dense = costs(case.world, case.width, 0, 2)[0]
    own = costs(case.world, case.width, case.experts, case.experts_per_token, case.parts)[0]
    budget = case.facts * case.exposures / batch_size(case) * base
    seed = round(budget / 5 / dense)
    return seed, round((budget - seed * dense) / own)


def arguments(case: Case) -> list[str]:
    """The arguments of `clip-moe run`."""
    image_size, patch_size = SIZES[case.world]
    # Both, since a dense and a sparse model of one folder have one recipe
    (seed_steps, dense_steps), (_, sparse_steps) = (steps(replace(case, experts=n)) for n in (0, case.experts or 8))
    rate = case.rate * RATE / case.width
    kinds, source = f"{KINDS.get(case.world, '')}{case.facts}", SOURCES.get(case.world)
    values = {
        "world": source or case.world,
        "kinds": kinds,
        "tasks": f"[{source} {kinds}]" if source else f"[{case.world}_{case.facts}]",
        "num_samples": 16 * case.facts,
        "image_size": image_size,
        "patch_size": patch_size,
        "batch_size": batch_size(case),
        "width": case.width,
        "ffn_width": 4 * case.width,
        "seed_rate": rate / 2,
        "rate": rate,
        "seed_steps": seed_steps,
        "dense_steps": dense_steps,
        "sparse_steps": sparse_steps,
        "seed": case.seed,
    }
    if case.experts:
        values |= {"num_experts": case.experts, "num_experts_per_tok": case.experts_per_token}
        values["norm_topk_prob"] = case.experts_per_token > 1
    if case.parts > 1:
        values["moe_intermediate_size"] = f"1/{case.parts}"
    stages = "upcycled,clip_up,sparse_score" if case.experts else "dense,dense_score"
    values["stages"] = f"initialized,seed_model,{stages}"
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


@command
def print_case(
    world: str,
    facts: int,
    width: int,
    exposures: int,
    /,
    *,
    experts: int = 0,
    experts_per_token: int = 2,
    budget_width: int | None = None,
    seed: int = 0,
    rate: float = 1.0,
    parts: int = 1,
) -> str:
    """The command that trains a model of a case and measures it.

    Args:
        world: names, characters, icons or molecules
        facts: how many
        width: hidden size of both towers
        exposures: how often the dense model of the budget sees each fact
        experts: of the sparse layers; 0 for a dense model
        experts_per_token: that a token meets
        budget_width: width of the dense model of the budget (default: the width)
        seed: of the run
        rate: times the rule's
        parts: experts are 1/parts as wide as the FFN
    """
    case = Case(world, facts, width, exposures, experts, experts_per_token, budget_width, seed, rate, parts)
    config = ["--config", "lab/recipes/clip_up_worlds.yaml", "--output_dir", f"runs/law/{case.name}"]
    return shlex.join(["clip-moe", "run", *config, *arguments(case)])


if __name__ == "__main__":
    print_case.main()
