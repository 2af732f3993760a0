"""Takes one expert out of a CLIP-MoE: the dense CLIP in which every token goes through that expert.

    python -m conversion.dense clip-moe-l14 expert-2 --expert 2

SOURCE is a folder or hub name of a `CLIPMoEModel`. `--expert base` takes the dense FFN that stays beside the experts
in a model with fusion gates. Routers and fusion gates are left out, so right after upcycling every expert gives back
the original model bit for bit. Before OUTPUT appears, the saved model is loaded again and compared in float32 with
the sparse model in which the chosen FFN has taken the place of all others.
"""

import argparse
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from conversion.checkpoints import architecture, check_equal, copy_processor, load_model, model_outputs, sample_inputs
from conversion.files import new_folder, one_line_errors
from conversion.rules import Rule, apply_rules
from conversion.upcycle import EXPERT_TENSORS, kept_rules, sparse_ffns
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel

BASE = "base"


def dense_config(config: CLIPMoEConfig) -> CLIPConfig:
    """The config of the dense model: CLIP's fields of the sparse one."""

    return CLIPConfig(
        **architecture(config, CLIPConfig)
        | {
            "text_config": architecture(config.text_config, CLIPTextConfig),
            "vision_config": architecture(config.vision_config, CLIPVisionConfig),
        }
    )


def extraction_rules(config: CLIPMoEConfig, expert: int | str) -> list[Rule]:
    """Rules from `CLIPMoEModel` to `CLIPModel` that keep one expert, or the base FFN, of every sparse layer."""
    rules = kept_rules(config, ())
    for ffn in sparse_ffns(config):
        rules.append(Rule(rf"{ffn}\.(router|fusion_gate)\..*", (), reason="a dense FFN has no routing"))
        if expert == BASE:
            rules.append(Rule(rf"({ffn})\.base\.(.*)", r"\1.\2"))
            rules.append(Rule(rf"{ffn}\.experts\..*", (), reason="the base FFN was chosen"))
        else:
            rules.append(Rule(rf"{ffn}\.base\..*", (), reason="an expert was chosen"))
            for name, expert_tensor in EXPERT_TENSORS.items():
                rules.append(Rule(rf"({ffn})\.experts\.{expert_tensor}", rf"\1.{name}", lambda stack: stack[expert]))
    return rules


def extract(sparse: CLIPMoEModel, expert: int | str) -> CLIPModel:
    """Builds the dense CLIP of one expert (from 0), or of the base FFN ("base"), in the sparse model's dtype.

    Raises:
        ValueError: some sparse tower has no such expert, or there is no sparse layer.
    """
    ffns = sparse_ffns(sparse.config)
    if not ffns:
        raise ValueError("the model has no sparse layer")
    for config in ffns.values():
        if expert == BASE and not config.fusion_gate:
            raise ValueError(f"{config.base_config_key}: there is no base FFN, since fusion_gate is False")
        if expert != BASE and not 0 <= expert < config.num_experts:
            raise ValueError(
                f"{config.base_config_key}: there is no expert {expert}, only 0 to {config.num_experts - 1}"
            )
    dense = CLIPModel(dense_config(sparse.config)).to(sparse.dtype)
    shapes = {key: tensor.shape for key, tensor in dense.state_dict().items()}
    dense.load_state_dict(apply_rules(sparse.state_dict(), shapes, extraction_rules(sparse.config, expert)))
    return dense.eval()


# Logits of fusion gates whose sigmoid is 1, only the base, and 0, only the experts
OPEN, CLOSED = 100.0, -100.0


@torch.no_grad()
def set_fusion_gates(sparse: CLIPMoEModel, logit: float) -> None:
    """Makes all fusion gates, in place, give sigmoid(logit) whatever the token."""
    for key, tensor in sparse.state_dict().items():
        if key.endswith(".mlp.fusion_gate.proj.weight"):
            tensor.zero_()
        elif key.endswith(".mlp.fusion_gate.proj.bias"):
            tensor.fill_(logit)


def verify(source: str | Path, folder: Path, expert: int | str) -> dict[str, float]:
    """Compares the saved dense model with the sparse one in which every token goes through the expert, in float32.

    Raises:
        ValueError: they do not compute the same.
    """
    sparse = load_model(CLIPMoEModel, source, dtype=torch.float32)
    set_fusion_gates(sparse, OPEN if expert == BASE else CLOSED)
    inputs = sample_inputs(sparse.config)
    with sparse.force_expert(0 if expert == BASE else expert):
        expected = model_outputs(sparse, inputs)
    return check_equal(expected, model_outputs(load_model(CLIPModel, folder, dtype=torch.float32), inputs))


def expert_argument(value: str) -> int | str:
    if value == BASE or value.isdecimal():
        return value if value == BASE else int(value)
    raise argparse.ArgumentTypeError(f"{value!r} is neither a number nor {BASE!r}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.dense", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="folder or hub name of a CLIPMoEModel")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder for the CLIPModel")
    parser.add_argument(
        "--expert", type=expert_argument, required=True, metavar="I", help=f"number of the expert, from 0, or {BASE!r}"
    )
    args = parser.parse_args(argv)
    with one_line_errors(), new_folder(args.output) as folder:
        extract(load_model(CLIPMoEModel, args.source), args.expert).save_pretrained(folder)
        copy_processor(args.source, folder)
        verify(args.source, folder, args.expert)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
