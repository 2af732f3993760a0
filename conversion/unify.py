"""Makes one CLIP-MoE of a dense CLIP and the experts trained from it (Diversified Multiplet Upcycling).

    python -m conversion.unify BASE OUTPUT --experts EXPERT [EXPERT ...]

BASE and every EXPERT are folders or hub names of `CLIPModel`s that differ in the FFNs alone. The FFNs of BASE become
expert 0 and those of the others experts 1, 2, ... of the sparse layers; routers are new (CLIP-MoE section 4,
https://arxiv.org/abs/2409.19291). Before OUTPUT appears, the saved model is loaded again, and with every token sent
through expert i it is compared with the i-th dense model in float32.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import CLIPModel

from conversion.checkpoints import (
    check_equal,
    copy_processor,
    load_model,
    model_outputs,
    new_folder,
    one_line_errors,
    sample_inputs,
)
from conversion.rules import Rule, cut
from conversion.upcycle import EXPERT_TENSORS, PRESETS, TOWERS, Preset, build_sparse, sparse_config, sparse_ffns
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel


def unifying_rules(config: CLIPMoEConfig) -> list[Rule]:
    """Rules from the dense models' tensors, named I.NAME for model I, to `CLIPMoEModel`: FFNs are stacked."""
    sparse = "|".join(rf"{ffn}\." for ffn in sparse_ffns(config))
    rules = [
        Rule(rf"0\.(?!logit_scale$|{sparse})(.*)", r"\1"),
        Rule(r"0\.logit_scale", "logit_scale", lambda scale: scale.reshape(1)),
        Rule(rf"[1-9]\d*\.(?!{sparse}).*", (), reason="the same in all models"),
    ]
    for ffn in sparse_ffns(config):
        for name, expert_tensor in EXPERT_TENSORS.items():
            target = rf"\1.experts.{expert_tensor}"
            rules.append(Rule(rf"\d+\.({ffn})\.{name}", target, lambda *ffns: torch.stack(ffns), merges=True))
    return rules


def unify(
    base: CLIPModel,
    experts: Sequence[CLIPModel],
    preset: Preset = PRESETS["clip_moe"],
    towers: Sequence[str] = TOWERS,
    seed: int = 0,
) -> CLIPMoEModel:
    """Builds the sparse model of a dense CLIP and the experts trained from it.

    Args:
        base: its FFNs are expert 0.
        experts: in their order, from expert 1 on.
        preset: which layers are sparse and how they route; its `num_experts` does not count.
        towers: those that become sparse.
        seed: of the routers, see `build_sparse`.

    Returns:
        The model in evaluation mode and the base's dtype.

    Raises:
        ValueError: there is no expert, one is of another architecture or differs from the base outside the FFNs of the
            sparse layers (names the tensors), the preset has a fusion gate, or see `sparse_config`.
    """
    if not experts:
        raise ValueError("there are no experts to unify: give at least one")
    if preset.fusion_gate:
        raise ValueError("only FFNs are unified: a preset with a fusion gate does not fit")
    config = sparse_config(base, dataclasses.replace(preset, num_experts=1 + len(experts)), towers)
    ffns = re.compile("|".join(rf"{ffn}\." for ffn in sparse_ffns(config)))
    source = {f"0.{name}": tensor for name, tensor in base.state_dict().items()}
    for number, expert in enumerate(experts, 1):
        state = expert.state_dict()
        differing = [
            name
            for name, tensor in base.state_dict().items()
            if name not in state
            or state[name].shape != tensor.shape
            or (not ffns.match(name) and not torch.equal(state[name], tensor))
        ]
        differing += sorted(state.keys() - base.state_dict().keys())
        if differing:
            raise ValueError(
                f"expert {number} was not trained from this base, or more than its FFNs were: it differs in "
                f"{cut(differing)}"
            )
        source |= {f"{number}.{name}": tensor for name, tensor in state.items()}
    return build_sparse(config, source, unifying_rules(config), base.dtype, seed)


def verify(dense: Sequence[str | Path], folder: Path) -> dict[str, float]:
    """Compares a saved sparse model, every token forced through expert i, with the i-th dense one, in float32.

    Args:
        dense: the base and the experts.

    Returns:
        Expert i's largest difference in NAME, as "expert i: NAME".

    Raises:
        ValueError: they do not compute the same.
    """
    sparse = load_model(CLIPMoEModel, folder, dtype=torch.float32)
    inputs = sample_inputs(sparse.config)
    expected, found = {}, {}
    for number, source in enumerate(dense):
        outputs = model_outputs(load_model(CLIPModel, source, dtype=torch.float32), inputs)
        with sparse.force_expert(number):
            forced = model_outputs(sparse, inputs)
        expected |= {f"expert {number}: {name}": tensor for name, tensor in outputs.items()}
        found |= {f"expert {number}: {name}": tensor for name, tensor in forced.items()}
    return check_equal(expected, found)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.unify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="folder or hub name of the CLIPModel that is expert 0")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder for the CLIPMoEModel")
    parser.add_argument("--experts", nargs="+", required=True, metavar="EXPERT", help="experts 1, 2, ...")
    parser.add_argument("--num-experts-per-tok", type=int, default=2, help="experts that compute each token, K")
    parser.add_argument(
        "--towers", nargs="+", choices=TOWERS, default=TOWERS, help="towers to make sparse (default: both)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the routers (default: 0)")
    args = parser.parse_args(argv)
    preset = dataclasses.replace(PRESETS["clip_moe"], num_experts_per_tok=args.num_experts_per_tok)
    with one_line_errors(), new_folder(args.output) as folder:
        models = [load_model(CLIPModel, source) for source in (args.base, *args.experts)]
        unify(models[0], models[1:], preset, args.towers, args.seed).save_pretrained(folder)
        copy_processor(args.base, folder)
        verify([args.base, *args.experts], folder)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
