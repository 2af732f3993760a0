"""Makes one CLIP-MoE of a CLIP and the experts trained from it.

    python -m conversion.unify BASE OUTPUT --experts EXPERT [EXPERT ...]

CLIP-MoE (Diversified Multiplet Upcycling, https://arxiv.org/abs/2409.19291, section 4): BASE and every EXPERT are
folders or hub names of `CLIPModel`s that differ in the FFNs alone. The FFNs of BASE become expert 0 and those of the
others experts 1, 2, ... of the sparse layers; routers are new.

CLIP-FMoE (section 4.3): BASE and every EXPERT are `CLIPMoEModel`s with one expert and a fusion gate. The experts are
stacked and their gates averaged, the FFNs of BASE stay beside them; routers are new.

Before OUTPUT appears, the saved model is loaded again, and with every token sent through expert i it is compared with
the i-th model in float32 (fusion gates closed).
"""

import argparse
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, PreTrainedModel

from conversion.checkpoints import check_equal, is_sparse, load_clip, load_model, model_outputs, sample_inputs
from conversion.dense import ONLY_EXPERTS, set_fusion_gates
from conversion.folders import load_config
from conversion.presets import LAYERS, PRESETS, TOWERS, Preset, changed_preset, read_sparse_layers
from conversion.processors import copy_processor, require_same
from conversion.rules import Rule
from conversion.upcycle import FFN_TO_EXPERTS, build_sparse, sparse_config, sparse_ffns
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel
from records.files import new_folder, one_line_errors
from records.messages import cut

# Of a sparse FFN with one expert, what stage 1 of CLIP-FMoE may train: a regular expression
TRAINED_PARTS = "(?:experts|fusion_gate|router)"


def unifying_rules(config: CLIPMoEConfig, base_expert: bool) -> list[Rule]:
    """Rules from the dense models' tensors, named I.NAME for model I, to `CLIPMoEModel`: FFNs are stacked.

    The FFNs of model 0 are expert 0, or the base beside the experts if there is a fusion gate, or are left out.
    """
    sparse = "|".join(rf"{ffn}\." for ffn in sparse_ffns(config))
    rules = [
        Rule(rf"0\.(?!logit_scale$|{sparse})(.*)", r"\1"),
        Rule(r"0\.logit_scale", "logit_scale", lambda scale: scale.reshape(1)),
        Rule(rf"[1-9]\d*\.(?!{sparse}).*", (), reason="the same in all models"),
    ]
    experts = r"\d+" if base_expert else r"[1-9]\d*"
    for ffn, tower_config in sparse_ffns(config).items():
        for name, expert_tensor in FFN_TO_EXPERTS.items():
            target = rf"\1.experts.{expert_tensor}"
            rules.append(Rule(rf"{experts}\.({ffn})\.{name}", target, lambda *ffns: torch.stack(ffns), merges=True))
        if tower_config.fusion_gate:
            rules.append(Rule(rf"0\.({ffn})\.(.*)", r"\1.base.\2"))
        elif not base_expert:
            rules.append(Rule(rf"0\.{ffn}\..*", (), reason="the base is no expert"))
    return rules


def unify(
    base: CLIPModel,
    experts: Sequence[CLIPModel],
    preset: Preset = PRESETS["clip_moe"],
    towers: Sequence[str] = TOWERS,
    seed: int = 0,
    base_expert: bool = True,
) -> CLIPMoEModel:
    """Builds the sparse model of a dense CLIP and the experts trained from it.

    Args:
        experts: in their order.
        preset: which layers are sparse and how they route; its `num_experts` does not count.
        towers: those that become sparse.
        seed: of routers and fusion gates, see `build_sparse`.
        base_expert: whether the FFNs of `base` are expert 0. With a fusion gate they stay beside the experts instead.

    Returns:
        The model in evaluation mode and the widest dtype of all.

    Raises:
        ValueError: there is no expert, one is of another architecture or differs from the base outside the FFNs of the
            sparse layers (names the tensors), or see `sparse_config`.
    """
    if not experts:
        raise ValueError("there are no experts to unify: give at least one")
    base_expert = base_expert and not preset.fusion_gate
    config = sparse_config(base.config, dataclasses.replace(preset, num_experts=base_expert + len(experts)), towers)
    source = _gather(base, experts, expert_parts(base.config, config))
    return build_sparse(config, source, unifying_rules(config, base_expert), _dtype(base, experts), seed)


def unify_sparse(
    base: CLIPMoEModel,
    experts: Sequence[CLIPMoEModel],
    num_experts_per_tok: int = 2,
    seed: int = 0,
    fusion_gate: bool = True,
    base_expert: bool = False,
) -> CLIPMoEModel:
    """Builds the sparse model of sparse models with one expert each (CLIP-FMoE section 4.3).

    Their experts are stacked, and their fusion gates averaged if they have some; then the base FFNs stay. Routers are
    new.

    Args:
        base: the model that they all started from.
        experts: in their order.
        num_experts_per_tok: K.
        seed: of routers and of gates that are new, see `build_sparse`.
        fusion_gate: of models without gates: whether new gates are put between the base's expert and the others.
        base_expert: of models without gates: whether the base's expert becomes expert 0, if no gate keeps it.

    Returns:
        The model in evaluation mode and the widest dtype of all.

    Raises:
        ValueError: there is no expert, the base does not have one expert in each sparse layer, only one tower has
            gates, or an expert is of another architecture, has other sparse layers or differs from the base in more
            than experts, routers and gates (names the tensors).
        huggingface_hub.errors.StrictDataclassError: K is larger than the number of experts.
    """
    if not experts:
        raise ValueError("there are no experts to unify: give at least one")
    config, base_expert = stacked_config(base.config, len(experts), num_experts_per_tok, fusion_gate, base_expert)
    ffns = sparse_ffns(base.config)
    gated = next(iter(ffns.values())).fusion_gate
    ffn = f"(?:{'|'.join(ffns)})"
    source = _gather(base, experts, expert_parts(base.config, config))
    rules = stacking_rules(ffn, base_expert, new_gates=fusion_gate and not gated)
    new_parts = ("router",) if gated else ("router", "fusion_gate")
    return build_sparse(config, source, rules, _dtype(base, experts), seed, new_parts)


def stacking_rules(ffn: str, base_expert: bool, new_gates: bool) -> list[Rule]:
    """Rules from sparse models of one expert each, tensors named I.NAME for model I, to one model of all experts.

    Args:
        ffn: regular expression of the names of the sparse FFNs.
        base_expert: whether the expert of model 0 is stacked with the others.
        new_gates: whether that expert becomes the base FFN instead, beside gates that no model has yet.
    """
    trained = rf"{ffn}\.{TRAINED_PARTS}"
    stacked = r"\d+" if base_expert else r"[1-9]\d*"
    rules = [
        Rule(rf"0\.(?!{trained}\.)(.*)", r"\1"),
        Rule(rf"[1-9]\d*\.(?!{trained}\.).*", (), reason="the same in all models"),
        Rule(rf"\d+\.{ffn}\.router\..*", (), reason="there was nothing to route"),
        Rule(rf"{stacked}\.({ffn}\.experts\..*)", r"\1", lambda *one: torch.cat(one), merges=True),
        Rule(rf"0\.{ffn}\.fusion_gate\..*", (), reason="what the gates started from"),
        Rule(rf"[1-9]\d*\.({ffn}\.fusion_gate\..*)", r"\1", lambda *g: torch.stack(g).mean(0), merges=True),
    ]
    if new_gates:
        for name, expert_tensor in FFN_TO_EXPERTS.items():
            rules.append(Rule(rf"0\.({ffn})\.experts\.{expert_tensor}", rf"\1.base.{name}", lambda one: one[0]))
    elif not base_expert:
        rules.append(Rule(rf"0\.{ffn}\.experts\..*", (), reason="what the experts started from"))
    return rules


def stacked_config(
    base: CLIPMoEConfig, num_experts: int, num_experts_per_tok: int, fusion_gate: bool, base_expert: bool
) -> tuple[CLIPMoEConfig, bool]:
    """The configuration of `unify_sparse`, and whether the experts of the base are the first ones.

    Raises:
        ValueError: the base has not one expert in each sparse layer, or fusion gates in one tower alone.
    """
    ffns = sparse_ffns(base)
    if not ffns or any(config.num_experts != 1 for config in ffns.values()):
        raise ValueError("the base must have sparse layers with one expert each, as what its experts were trained from")
    if len({config.fusion_gate for config in ffns.values()}) > 1:
        raise ValueError("the base must have fusion gates in both towers or in none")
    gated = next(iter(ffns.values())).fusion_gate
    base_expert = base_expert and not gated and not fusion_gate
    settings = base.to_dict()
    for tower in ("text_config", "vision_config"):
        if settings[tower]["moe_layers"]:
            settings[tower]["num_experts"] = base_expert + num_experts
            settings[tower]["num_experts_per_tok"] = num_experts_per_tok
            settings[tower]["fusion_gate"] = gated or fusion_gate
    return CLIPMoEConfig.from_dict(settings), base_expert


def _dtype(base: PreTrainedModel, experts: Sequence[PreTrainedModel]) -> torch.dtype:
    """Experts are trained in float32, whatever the base is stored in."""
    return functools.reduce(torch.promote_types, (model.dtype for model in (base, *experts)))


def expert_parts(base: CLIPConfig | CLIPMoEConfig, unified: CLIPMoEConfig) -> re.Pattern[str]:
    """Matches the parameters in which an expert may differ from its base."""
    if is_sparse(base):
        return re.compile(rf"(?:{'|'.join(sparse_ffns(base))})\.{TRAINED_PARTS}\.")
    return re.compile(rf"(?:{'|'.join(sparse_ffns(unified))})\.")


def require_expert(name: str, differing: Sequence[str]) -> None:
    """Raises ValueError if an expert differs from its base in tensors in which it may not; names them."""
    if differing:
        raise ValueError(
            f"{name} was not trained from this base, or more of it was than an expert is: it differs in "
            f"{cut(differing)}"
        )


def _gather(
    base: PreTrainedModel, experts: Sequence[PreTrainedModel], parts: re.Pattern[str]
) -> dict[str, torch.Tensor]:
    """The tensors of all models, named I.NAME for model I; the base is model 0."""
    base_state = base.state_dict()
    source = {f"0.{name}": tensor for name, tensor in base_state.items()}
    for number, expert in enumerate(experts, 1):
        state = expert.state_dict()
        differing = [
            name
            for name, tensor in base_state.items()
            if name not in state
            or state[name].shape != tensor.shape
            or (not parts.match(name) and not (state[name] == tensor).all())
        ]
        differing += sorted(state.keys() - base_state.keys())
        require_expert(f"expert {number}", differing)
        source |= {f"{number}.{name}": tensor for name, tensor in state.items()}
    return source


def verify(base: str | Path, experts: Sequence[str | Path], folder: Path) -> dict[str, float]:
    """Compares a saved sparse model, every token forced through expert i, with the i-th expert's model, in float32.

    Fusion gates are averaged or new: they are closed in both models, which leaves the experts alone. The base is
    compared where it is expert 0.

    Returns:
        Expert i's largest difference in NAME, as "expert i: NAME".

    Raises:
        ValueError: they do not compute the same.
    """
    sparse = load_model(CLIPMoEModel, folder, dtype=torch.float32)
    set_fusion_gates(sparse, ONLY_EXPERTS)
    num_experts = max(config.num_experts for config in sparse_ffns(sparse.config).values())
    sources = [base, *experts] if num_experts > len(experts) else experts
    inputs = sample_inputs(sparse.config)
    expected, found = {}, {}
    for number, source in enumerate(sources):
        model = load_clip(source, dtype=torch.float32)
        if isinstance(model, CLIPMoEModel):
            set_fusion_gates(model, ONLY_EXPERTS)
        outputs = model_outputs(model, inputs)
        with sparse.force_expert(number, scale=1.0):
            forced = model_outputs(sparse, inputs)
        expected |= {f"expert {number}: {name}": tensor for name, tensor in outputs.items()}
        found |= {f"expert {number}: {name}": tensor for name, tensor in forced.items()}
    return check_equal(expected, found)


def convert(
    base: str | Path,
    experts: Sequence[str | Path],
    folder: Path,
    preset: Preset = PRESETS["clip_moe"],
    towers: Sequence[str] = TOWERS,
    seed: int = 0,
    base_expert: bool = True,
) -> None:
    """Saves the unified model of folders or hub names, and the base's processor, into `folder`, and verifies it."""
    require_same([base, *experts])
    start = load_clip(base)
    models = [load_model(type(start), expert) for expert in experts]
    if is_sparse(start.config):
        top_k, gate = preset.num_experts_per_tok, preset.fusion_gate
        unified = unify_sparse(start, models, top_k, seed, gate, base_expert)
    else:
        unified = unify(start, models, preset, towers, seed, base_expert)
    unified.save_pretrained(folder)
    copy_processor(base, folder)
    verify(base, experts, folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.unify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="folder or hub name of what the experts were trained from")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder for the CLIPMoEModel")
    parser.add_argument("--experts", nargs="+", required=True, metavar="EXPERT", help="experts 1, 2, ...")
    parser.add_argument("--num-experts-per-tok", type=int, default=2, help="experts that compute each token, K")
    parser.add_argument(
        "--towers",
        nargs="+",
        choices=TOWERS,
        default=TOWERS,
        help="towers to make sparse (default: both); of dense models only",
    )
    parser.add_argument(
        "--sparse-layers",
        nargs="+",
        metavar="LAYERS",
        help=f"{', '.join(LAYERS)} (default: all), or layers from 0 such as 1,3; of each tower as in text=1,3 "
        "vision=5,7; of dense models only",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the routers (default: 0)")
    args = parser.parse_args(argv)
    with one_line_errors():
        if args.sparse_layers is not None and is_sparse(load_config(args.base)):
            raise ValueError(f"--sparse-layers: {args.base} is sparse already, which settles its sparse layers")
        layers = read_sparse_layers(args.sparse_layers or ["all"])
        changes = {"num_experts_per_tok": args.num_experts_per_tok, "sparse_layers": layers}
        with new_folder(args.output) as folder:
            convert(args.base, args.experts, folder, changed_preset("clip_moe", changes), args.towers, args.seed)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
