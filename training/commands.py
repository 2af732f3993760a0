"""The commands of this room: `clip-moe finetune`, `run` and `recipes`.

Of several processes: `accelerate launch -m clip_moe run`, or `accelerate launch training/upcycle.py` in a checkout.
"""

import json
import shutil
from pathlib import Path

from clip_moe.engine.command_line import Folder, RehearsedBatch, command
from clip_moe.engine.files import new_folder
from clip_moe.engine.yaml_files import read_yaml

RECIPES = Path(__file__).parent / "recipes"


@command
def run(
    *overrides: str,
    config: Path | None = None,
    output_dir: Folder | None = None,
    stages: str | None = None,
    experts: str | None = None,
    plan: bool = False,
    rehearse: bool = False,
    rehearse_batch: RehearsedBatch | None = None,
) -> str | None:
    """Run the stages of a recipe. Finished stages are skipped, and an interrupted one resumes where it stopped.

    Any other --KEY VALUE overrides a key of the recipe: its own (--seed 1) or a stage's, by the stage's name
    (--clip_up.max_steps 100, --clip_up.data.num_samples 1000). Values are read as YAML.

        clip-moe run --config training/recipes/clip_moe_demo.yaml --output_dir runs/mine --clip_moe.max_steps 50
        accelerate launch -m clip_moe run --config training/recipes/demo.yaml

    Args:
        config: recipe, a YAML file (default: the demo)
        output_dir: folder for the stages' outputs (default: the recipe's)
        stages: run only these, e.g. upcycled,clip_up (default: all)
        experts: train only these, e.g. 1,2, and the stages that they need (default: everything)
        plan: print the stages, their inputs and states, without running them
        rehearse: run two steps of each stage on few samples, keep nothing, and print the time and memory of a full run
        rehearse_batch: samples per process in a rehearsed batch
    """
    from clip_moe.engine.flags import read_flags, read_value
    from clip_moe.engine.plan import plan as plan_of
    from clip_moe.engine.plan import wanted_stages
    from clip_moe.engine.recipe import load_recipe

    changed = {key: read_value(key, values) for key, values in read_flags(overrides).items()}
    if output_dir is not None:
        changed["output_dir"] = str(output_dir)
    only = None if stages is None else [name.strip() for name in stages.split(",")]
    numbers = None if experts is None else read_yaml(f"[{experts}]", "--experts")
    if numbers is not None and not (numbers and all(type(number) is int for number in numbers)):
        raise ValueError(f"--experts takes numbers, such as 1,2, got {experts!r}")
    recipe = load_recipe(config or RECIPES / "demo.yaml", changed)
    if plan:
        return plan_of(recipe, wanted_stages(recipe, only, numbers))
    if rehearse or rehearse_batch is not None:
        from clip_moe.engine.rehearsal import rehearse as rehearsal_of

        return rehearsal_of(recipe, wanted_stages(recipe, only, numbers), rehearse_batch)
    from clip_moe.engine.runner import run_recipe, usage_hint

    run_recipe(recipe, only, numbers)
    return usage_hint(recipe, only)


@command
def finetune(
    data: str,
    output: Folder,
    /,
    *overrides: str,
    model: str | None = None,
    caption_column: str | None = None,
    learning_rate: float | None = None,
    global_batch_size: int | None = None,
    keep_tasks: list[str] | None = None,
    keep_at_least: float | None = None,
    plan: bool = False,
    rehearse: bool = False,
    rehearse_batch: RehearsedBatch | None = None,
) -> str | None:
    """Fine-tune a dense CLIP on captioned pictures, in ways that forget less and with experts, and say which is best.

    It runs training/recipes/finetune.yaml: all weights (OUTPUT/dense), their mean with those before (dense_half_way),
    and embeddings held to those before, dense and with 32 narrow experts (dense_kept, sparse_kept).
    OUTPUT/report/report.md begins with the answer: what was learned and kept, whether experts helped, and which folder
    to use. Any other --KEY VALUE overrides a key of the recipe, as in
    `clip-moe run`.

        clip-moe finetune symbols runs/symbols --model training/symbol_clip --pictures.data.num_samples 400
        clip-moe finetune my/photos runs/photos --model openai/clip-vit-base-patch32 --keep_tasks imagenet1k

    Args:
        data: a folder of pictures with captions, a table, shards or a Hub name; without a split test, a tenth is tested
        output: folder for the models and the report
        model: a dense CLIP of any family, a folder or a Hub name (default: openai/clip-vit-base-patch32)
        caption_column: the column of the captions (default: caption)
        learning_rate: the highest, of a cosine schedule (default: 1e-5, for pretrained models)
        global_batch_size: pairs in a step, at most those in training (default: 64)
        keep_tasks: benchmarks or built-in tasks on what the model should still know
        keep_at_least: points of these that a model may lose to be recommended (default: 1)
        plan: print the stages, their inputs and states, without running them
        rehearse: run two steps of each stage on few samples, keep nothing, and print the time and memory of a full run
        rehearse_batch: samples per process in a rehearsed batch
    """
    inputs = dict(caption_column=caption_column, learning_rate=learning_rate, global_batch_size=global_batch_size)
    inputs |= dict(data=data, model=model, keep_tasks=keep_tasks, keep_at_least=keep_at_least)
    given = {key: value for key, value in inputs.items() if value is not None}
    flags = (
        *(part for key, value in given.items() for part in (f"--{key}", json.dumps(value, ensure_ascii=False))),
        *overrides,
    )
    options = dict(config=RECIPES / "finetune.yaml", output_dir=output)
    return run(*flags, **options, plan=plan, rehearse=rehearse, rehearse_batch=rehearse_batch)


@command
def recipes(output: Folder = Path(), /) -> str:
    """Copy the recipes, and the small models that they start from, to OUTPUT/training, where an installed package shows
    them.

    Recipes name these models by their place, so they run in OUTPUT. In a checkout, all is there.

        clip-moe recipes
        clip-moe run --config training/recipes/clip_moe_demo.yaml

    Args:
        output: a folder that has no folder `training` yet
    """
    with new_folder(output / "training") as folder:
        for name in ("recipes", "accelerate", "symbol_clip", "name_clip_moe"):
            shutil.copytree(Path(__file__).with_name(name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return f"wrote {output / 'training'}; recipes run in {output.absolute()}"
