"""The commands of this room: `clip-moe upcycle`, `convert NAME` and `publish`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from conversion.presets import PRESETS, TOWERS, changed_preset, read_sparse_layers
from records.command_line import Folder, command
from records.files import new_folder

Tower = Literal[*TOWERS]


@command
def upcycle(
    source: str,
    output: Folder,
    /,
    *,
    preset: Literal[*PRESETS],
    towers: list[Tower] = TOWERS,
    seed: int = 0,
    sparse_layers: list[str] | None = None,
    num_experts: int | None = None,
    num_experts_per_tok: int | None = None,
    norm_topk_prob: bool | None = None,
    fusion_gate: bool | None = None,
    capacity_factor: float | None = None,
) -> str:
    """Sparse upcycling: a dense CLIP becomes a CLIP-MoE whose experts are copies of its FFNs.

        clip-moe upcycle openai/clip-vit-base-patch16 clip-up-b16 --preset clip_up

    Experts are copies of the dense FFN (Komatsuzaki et al., 2023, https://arxiv.org/abs/2212.05055), routers and fusion
    gates are new, all else is kept. Before OUTPUT appears, the saved model is loaded again and compared with the source
    in float32: where routing weights sum to 1, equal experts compute the dense FFN, so the two agree up to rounding.
    Where they do not (--no-norm-topk-prob, as in the preset clip_up), the comparison alone is made with renormalized
    weights.

    CLIP-FMoE's baseline of five experts without fusion gate:

        --preset clip_fmoe --num-experts 5 --num-experts-per-tok 3 --no-fusion-gate

    Args:
        source: folder or hub name of a CLIPModel or of another family's (docs/families.md), or of a CLIPMoEModel
            without sparse layers, as a dense CLIP with one encoder for images and texts is saved
        output: new folder for the CLIPMoEModel
        preset: the paper whose architecture to build; what follows the seed changes it
        towers: which become sparse, of those that the family has sparse
        seed: of routers and fusion gates
        sparse_layers: all, every_second, second_half_every_second, or layers from 0 such as 1,3; of each tower as in
            text=1,3 vision=5,7
        num_experts: experts per sparse layer, E
        num_experts_per_tok: experts that compute each token, K
        norm_topk_prob: whether a token's K weights are made to sum to 1
        fusion_gate: whether to keep the dense FFN beside the experts
        capacity_factor: C: an expert takes at most T / E * C tokens in training
    """
    changes = {
        "sparse_layers": None if sparse_layers is None else read_sparse_layers(sparse_layers),
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "norm_topk_prob": norm_topk_prob,
        "fusion_gate": fusion_gate,
        "capacity_factor": capacity_factor,
    }
    changed = changed_preset(preset, {name: value for name, value in changes.items() if value is not None})
    from conversion.upcycle import convert

    with new_folder(output) as folder:
        convert(source, folder, changed, towers, seed)
    return f"wrote {output}"


@command
def unify(
    base: str,
    output: Folder,
    /,
    *,
    experts: list[str],
    num_experts_per_tok: int = 2,
    towers: list[Tower] = TOWERS,
    sparse_layers: list[str] | None = None,
    seed: int = 0,
) -> str:
    """One CLIP-MoE of a CLIP and the experts trained from it.

    CLIP-MoE (Diversified Multiplet Upcycling, https://arxiv.org/abs/2409.19291, section 4): BASE and every expert are
    `CLIPModel`s that differ in the FFNs alone. The FFNs of BASE become expert 0 and those of the others experts 1, 2,
    ... of the sparse layers; routers are new.

    CLIP-FMoE (section 4.3): BASE and every expert are `CLIPMoEModel`s with one expert and a fusion gate. The experts
    are stacked and their gates averaged, the FFNs of BASE stay beside them; routers are new.

    Before OUTPUT appears, the saved model is loaded again, and with every token sent through expert i it is compared
    with what expert i was made of.

    Args:
        base: folder or hub name of what the experts were trained from
        output: new folder for the CLIPMoEModel
        experts: folders or hub names of experts 1, 2, ...
        num_experts_per_tok: experts that compute each token, K
        towers: which become sparse; of dense models only
        sparse_layers: as of upcycle; of dense models only (default: all)
        seed: of the routers
    """
    from conversion.unify import convert

    layers = read_sparse_layers(sparse_layers or ["all"])
    preset = changed_preset("clip_moe", {"num_experts_per_tok": num_experts_per_tok, "sparse_layers": layers})
    with new_folder(output) as folder:
        convert(base, experts, folder, preset, towers, seed)
    return f"wrote {output}"


@command
def assemble(output: Folder, /, *, experts: list[str]) -> str:
    """Whole CLIPs in one `CLIPMoDEModel`, each in a folder of its own (MoDE).

    Without clusters all experts have the same weight. The assemble stage of a recipe adds the centers that tasks are
    routed by.

    Args:
        output: new folder for the CLIPMoDEModel
        experts: folders or hub names of dense or sparse models, also of several families
    """
    from conversion.assemble import convert

    with new_folder(output) as folder:
        convert(experts, folder)
    return f"wrote {output}"


@command
def average(output: Folder, /, *, models: list[str], weights: list[float] | None = None) -> str:
    """One CLIP whose parameters are the weighted means of those of several.

        clip-moe convert average OUTPUT --models BASE FINE_TUNED --weights 0.3 0.7

    Equal weights give a start for fine-tuning (MoDE appendix D). Between a model and what fine-tuning made of it lies a
    line of models that trade what was learned against what was kept (WiSE-FT, https://arxiv.org/abs/2109.01903).

    Args:
        output: new folder for the model
        models: folders or hub names
        weights: one a model, sum 1 (default: all alike)
    """
    from conversion.average import convert

    with new_folder(output) as folder:
        convert(models, folder, weights)
    return f"wrote {output}"


@command
def dense(source: str, output: Folder, /, *, expert: int | Literal["base"], scale: str | None = None) -> str:
    """One expert of a CLIP-MoE as a dense CLIP: every token goes through that expert.

        clip-moe convert dense clip-up-b16 expert-2 --expert 2 --scale experts/experts.json

    Routers and fusion gates are left out, so right after upcycling every expert gives back the original model bit for
    bit (with --scale 1, where one is needed). Before OUTPUT appears, the saved model is loaded again and compared in
    float32 with the sparse model in which the chosen FFN has taken the place of all others.

    Args:
        source: folder or hub name of a CLIPMoEModel
        output: new folder for the CLIPModel
        expert: number of the expert, from 0; or base, the dense FFN that stays beside the experts where there are
            fusion gates
        scale: where the weights of a token's experts do not sum to 1, as in CLIP-UP: what the expert's output is
            multiplied by, a number, or the experts.json that `clip-moe experts` writes
    """
    from conversion.dense import convert, read_scale

    with new_folder(output) as folder:
        convert(source, folder, expert, None if scale is None else read_scale(scale, source))
    return f"wrote {output}"


@command
def long_context(source: str, output: Folder, /, *, length: int, keep: int = 20) -> str:
    """A CLIP, dense or sparse, with a longer text context, as Long-CLIP (https://arxiv.org/abs/2403.15378) makes it.

        clip-moe convert long-context openai/clip-vit-large-patch14 clip-l14-248 --length 248

    The first rows of the position table, which most captions of CLIP's training reach, stay as they are. Between every
    later row and the next one, new rows are interpolated. Before OUTPUT appears, the saved model is loaded again and
    compared with the source on short texts, which it must embed alike.

    Args:
        source: folder or hub name of a CLIP, or of a text tower alone, such as Stable Diffusion's text encoders
        output: new folder for the longer model
        length: text positions, such as 248 for a model of 77
        keep: first positions that stay
    """
    from conversion.long_context import convert

    with new_folder(output) as folder:
        convert(source, folder, length, keep)
    return f"wrote {output}"


@command
def openai(
    archive: Path,
    output: Folder,
    /,
    *,
    activation: Literal["quick_gelu", "gelu"] | None = None,
    vision_heads: int | None = None,
    text_heads: int | None = None,
    processor: str | None = None,
    trust_archive: Annotated[bool, Parameter(negative=())] = False,
) -> str:
    """OpenAI's CLIP weights, and open_clip's and Long-CLIP's of their architecture, as transformers' `CLIPModel`.

        clip-moe convert openai ViT-L-14.pt clip-vit-large-patch14 --processor openai/clip-vit-large-patch14

    Weights become float32. Before OUTPUT appears, the saved model is loaded again and compared with the original.

    Args:
        archive: the TorchScript archive that OpenAI publishes (loading TorchScript can run code, so it must be one of
            the published ones, by its sha256); or a state dict, saved with torch.save or as .safetensors, also within
            an open_clip training checkpoint. If open_clip_config.json lies beside it, as on the Hub, it tells the
            activation, the heads, and how the processor prepares images
        output: new folder for the CLIPModel
        activation: default: quick_gelu, with a warning if the file is not one of OpenAI's own
        vision_heads: attention heads of the image encoder (default: width / 64, wider ones from 1280 on as open_clip)
        text_heads: attention heads of the text encoder (default: width / 64)
        processor: folder or hub name whose processor is saved with the model
        trust_archive: load a TorchScript archive that OpenAI did not publish
    """
    from conversion.openai import write_model

    write_model(archive, output, activation, vision_heads, text_heads, processor, trust_archive)
    return f"wrote {output}"


@command
def released_clip_moe(
    source: str,
    output: Folder,
    /,
    *,
    reverse: Annotated[bool, Parameter(negative=())] = False,
    num_experts_per_tok: int = 2,
    processor: str | None = None,
) -> str:
    """The checkpoints that CLIP-MoE's authors released (https://arxiv.org/abs/2409.19291), and back.

    Which layers are sparse and how many experts they have follows from the tensors; how many experts compute a token
    does not. Before OUTPUT appears, what was written is read again and compared with the source.

        clip-moe convert released-clip-moe clip-moe-4-2-sharegpt4v.pt OUTPUT --processor openai/clip-vit-large-patch14
        clip-moe convert released-clip-moe FOLDER checkpoint.pt --reverse

    Args:
        source: a state dict, saved with torch.save or as .safetensors; with --reverse, folder of a CLIPMoEModel
        output: new folder; with --reverse, new .pt or .safetensors file
        reverse: from a CLIPMoEModel to the authors' layout
        num_experts_per_tok: experts that compute each token, K
        processor: folder or hub name whose processor is saved with the model
    """
    from conversion.released_clip_moe import write_checkpoint, write_model

    if reverse:
        write_checkpoint(source, output)
    else:
        write_model(Path(source), output, num_experts_per_tok, processor)
    return f"wrote {output}"


@command
def llava(llava: str, tower: str, output: Folder, /) -> str:
    """A LLaVA of transformers with a CLIP-MoE in place of its vision tower.

        clip-moe convert llava llava-hf/llava-1.5-7b-hf clip-moe-l14-336 llava-moe

    The language model and the projector stay as they are: a tower upcycled from the CLIP that the LLaVA was trained
    with fits at once, any other one of the same width needs the projector trained again. Before OUTPUT appears, the
    saved model is loaded again: its image features must be the projected hidden states of the tower, and its language
    model must compute what it computed. No two LLaVAs are in memory at a time. To load the result,
    `import modeling_clip_moe` first.

    Args:
        llava: folder or hub name of a LlavaForConditionalGeneration
        tower: folder or hub name of a sparse model, or of its vision tower alone
        output: new folder for the LLaVA
    """
    from conversion.llava import convert

    with new_folder(output) as folder:
        convert(llava, tower, folder)
    return f"wrote {output}"


@command
def publish(
    source: str,
    repository: str,
    /,
    *,
    dry_run: Folder | None = None,
    private: bool | None = None,
    revision: str | None = None,
    pull_request: Annotated[bool, Parameter(negative=())] = False,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """A model on the Hub: a folder that loads by itself, with its code, its processor, its card and its scores.

    What is published has to load in a process without this package and to compute there what it computes here;
    otherwise nothing is uploaded. The card is made of what the run that trained the model left: its recipe, its stages'
    records and the results of its evaluation.

        clip-moe publish runs/clip_moe_demo/clip_moe user/clip-moe --base-model user/base --license apache-2.0
        clip-moe publish runs/clip_moe_demo/clip_moe user/clip-moe --dry-run runs/published

    Args:
        source: a finished stage, or any folder of a model
        repository: user/name on the Hub
        dry_run: write the folder there and upload nothing
        private: of a new repository
        revision: branch to upload to
        pull_request: propose the upload as a pull request
        license: of the weights, as the Hub names it: mit, apache-2.0, ...
        base_model: the dense model on the Hub (default: what the recipe starts from)
    """
    if dry_run is not None:
        from conversion.publishing.bundle import build

        with new_folder(dry_run) as folder:
            build(source, folder, repository, license, base_model)
        return f"wrote {dry_run}; nothing was uploaded"
    from conversion.publish import publish as upload

    options = {"private": private, "revision": revision, "pull_request": pull_request}
    return f"published at {upload(source, repository, license, base_model, **options)}"
