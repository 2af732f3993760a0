"""The layout of the released CLIP-MoE checkpoints, against a forward written here from its description alone."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_openai import torchscript
from test_upcycle import processor, tiny_clip
from transformers import AutoModel, AutoProcessor

from conversion import released_clip_moe
from conversion.presets import PRESETS
from conversion.released_clip_moe import convert, export, main
from conversion.upcycle import upcycle
from modeling_clip_moe import CLIPMoEModel

WIDTH, HEADS, VOCABULARY, POSITIONS, GRID, PATCH, EMBEDDING = 128, 2, 40, 248, 2, 4, 24


def checkpoint(text_sparse=(0, 1), vision_sparse=(1, 2), num_experts=3, inside=""):
    """Random tensors in the authors' layout: two text layers and three of the image tower, of which some are dense."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=0.3):
        return torch.randn(*shape, generator=generator) * scale

    state = {
        "positional_embedding": random(POSITIONS, WIDTH),
        "positional_embedding_res": random(POSITIONS, WIDTH),
        "text_projection": random(WIDTH, EMBEDDING),
        "logit_scale": torch.tensor(2.5),
        "token_embedding.weight": random(VOCABULARY, WIDTH),
        "ln_final.weight": 1 + random(WIDTH),
        "ln_final.bias": random(WIDTH),
        "visual.class_embedding": random(WIDTH),
        "visual.positional_embedding": random(GRID**2 + 1, WIDTH),
        "visual.proj": random(WIDTH, EMBEDDING),
        "visual.conv1.weight": random(WIDTH, 3, PATCH, PATCH),
        **{f"visual.ln_{end}.weight": 1 + random(WIDTH) for end in ("pre", "post")},
        **{f"visual.ln_{end}.bias": random(WIDTH) for end in ("pre", "post")},
    }
    for tower, layers, sparse in (("", 2, text_sparse), ("visual.", 3, vision_sparse)):
        for layer in range(layers):
            block = f"{tower}transformer.resblocks.{layer}"
            state |= {
                f"{block}.attn.in_proj_weight": random(3 * WIDTH, WIDTH, scale=0.1),
                f"{block}.attn.in_proj_bias": random(3 * WIDTH),
                f"{block}.attn.out_proj.weight": random(WIDTH, WIDTH, scale=0.1),
                f"{block}.attn.out_proj.bias": random(WIDTH),
            }
            for norm in ("ln_1", "ln_2"):
                state |= {f"{block}.{norm}.weight": 1 + random(WIDTH), f"{block}.{norm}.bias": random(WIDTH)}
            ffns = ["mlp"]
            if layer in sparse:
                ffns = [f"{inside}experts.{number}" for number in range(num_experts)]
                state[f"{block}.{inside}gate.weight"] = random(num_experts, WIDTH)
            for ffn in ffns:
                state |= {
                    f"{block}.{ffn}.c_fc.weight": random(2 * WIDTH, WIDTH, scale=0.1),
                    f"{block}.{ffn}.c_fc.bias": random(2 * WIDTH),
                    f"{block}.{ffn}.c_proj.weight": random(WIDTH, 2 * WIDTH, scale=0.1),
                    f"{block}.{ffn}.c_proj.bias": random(WIDTH),
                }
    return state


def norm(state, name, x):
    mean, variance = x.mean(), x.var(unbiased=False)
    return (x - mean) / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]


def ffn(state, name, x):
    hidden = state[f"{name}.c_fc.weight"] @ x + state[f"{name}.c_fc.bias"]
    hidden = hidden / (1 + torch.exp(-1.702 * hidden))  # QuickGELU
    return state[f"{name}.c_proj.weight"] @ hidden + state[f"{name}.c_proj.bias"]


def mixture(state, block, x, top_k):
    """One token: the gate's softmax, the best experts, their probabilities made to sum to 1."""
    if f"{block}.gate.weight" not in state:
        return ffn(state, f"{block}.mlp", x)
    logits = state[f"{block}.gate.weight"] @ x
    probabilities = torch.exp(logits) / torch.exp(logits).sum()
    best = sorted(range(len(logits)), key=lambda j: -probabilities[j])[:top_k]
    total = sum(probabilities[j] for j in best)
    return sum(probabilities[j] / total * ffn(state, f"{block}.experts.{j}", x) for j in best)


def transformer(state, prefix, layers, tokens, causal, top_k):
    """A list of tokens through all blocks, one token, head and expert at a time."""
    width = WIDTH // HEADS
    for layer in range(layers):
        block = f"{prefix}transformer.resblocks.{layer}"
        weight, bias = state[f"{block}.attn.in_proj_weight"], state[f"{block}.attn.in_proj_bias"]
        packed = [(weight @ norm(state, f"{block}.ln_1", x) + bias).chunk(3) for x in tokens]
        attended = []
        for i in range(len(tokens)):
            heads = []
            for head in range(HEADS):
                part = slice(head * width, (head + 1) * width)
                seen = range(i + 1) if causal else range(len(tokens))
                scores = torch.stack([packed[i][0][part] @ packed[j][1][part] / math.sqrt(width) for j in seen])
                shares = torch.exp(scores) / torch.exp(scores).sum()
                heads.append(sum(share * packed[j][2][part] for share, j in zip(shares, seen, strict=True)))
            out = state[f"{block}.attn.out_proj.weight"] @ torch.cat(heads) + state[f"{block}.attn.out_proj.bias"]
            attended.append(tokens[i] + out)
        tokens = [x + mixture(state, block, norm(state, f"{block}.ln_2", x), top_k) for x in attended]
    return tokens


def embed_text(state, ids, top_k=2):
    tokens = []
    for position, number in enumerate(ids.tolist()):
        table = "positional_embedding" if position < 20 else "positional_embedding_res"
        tokens.append(state["token_embedding.weight"][number] + state[table][position])
    tokens = transformer(state, "", 2, tokens, True, top_k)
    last = max(range(len(ids)), key=lambda position: (ids[position].item(), -position))
    return norm(state, "ln_final", tokens[last]) @ state["text_projection"]


def embed_image(state, image, top_k=2):
    tokens = [state["visual.class_embedding"]]
    for row in range(GRID):
        for column in range(GRID):
            patch = image[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            tokens.append((state["visual.conv1.weight"] * patch).sum(dim=(1, 2, 3)))
    tokens = [x + state["visual.positional_embedding"][position] for position, x in enumerate(tokens)]
    tokens = [norm(state, "visual.ln_pre", x) for x in tokens]
    tokens = transformer(state, "visual.", 3, tokens, False, top_k)
    return norm(state, "visual.ln_post", tokens[0]) @ state["visual.proj"]


@pytest.mark.parametrize("inside", ["", "mlp."])
@pytest.mark.parametrize(
    ("text_sparse", "vision_sparse", "top_k"), [((0, 1), (0, 1, 2), 2), ((), (1, 2), 2), ((0, 1), (2,), 1)]
)
def test_computes_what_the_layout_says(text_sparse, vision_sparse, top_k, inside):
    state = checkpoint(text_sparse, vision_sparse)
    model = convert(checkpoint(text_sparse, vision_sparse, inside=inside), top_k)
    assert (model.config.text_config.moe_layers, model.config.vision_config.moe_layers) == (
        list(text_sparse),
        list(vision_sparse),
    )
    ids = torch.randint(VOCABULARY - 1, (2, 40), generator=torch.Generator().manual_seed(1))
    ids[0, 31] = ids[1, 12] = VOCABULARY - 1  # the end, in one text beyond the first 20 positions
    images = torch.randn(2, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        texts, pictures = model.encode_text(ids), model.encode_image(images)
    for i in range(2):
        torch.testing.assert_close(texts[i], embed_text(state, ids[i], top_k), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pictures[i], embed_image(state, images[i], top_k), atol=1e-5, rtol=1e-5)


def test_texts_without_an_end_are_pooled_at_their_highest_id():
    """Which transformers does for eos_token_id 2 alone."""
    ids = torch.tensor([[3, 30, 7, 30, 2], [5, 4, 3, 2, 1]])
    model = convert(checkpoint())
    assert model.config.text_config.eos_token_id == 2 and model.config.router_aux_loss_coef == 0.01
    with torch.no_grad():
        texts = model.encode_text(ids)
    for row, text in zip(ids, texts, strict=True):
        torch.testing.assert_close(text, embed_text(checkpoint(), row), atol=1e-5, rtol=1e-5)


def test_all_positions():
    """The last of 248 tokens sees the last row of the second table."""
    state = checkpoint()
    ids = torch.randint(VOCABULARY - 1, (1, POSITIONS), generator=torch.Generator().manual_seed(1))
    ids[0, -1] = VOCABULARY - 1
    with torch.no_grad():
        before = convert(state).encode_text(ids)
        torch.testing.assert_close(before[0], embed_text(state, ids[0]), atol=1e-5, rtol=1e-5)
        state["positional_embedding_res"][-1] *= 2
        assert not torch.allclose(convert(state).encode_text(ids), before)
        state["positional_embedding_res"][-1] /= 2
        state["positional_embedding"][20:] *= 2  # rows that are not used
        state["positional_embedding_res"][:20] *= 2
        torch.testing.assert_close(convert(state).encode_text(ids), before)


def test_round_trip_from_the_layout_bit_for_bit():
    state = checkpoint()
    back = export(convert(state))
    assert back.keys() == state.keys()
    used = {"positional_embedding": slice(20), "positional_embedding_res": slice(20, None)}
    for key, tensor in state.items():
        rows = used.get(key, ...)
        assert torch.equal(back[key][rows], tensor[rows]), key
    assert torch.equal(back["positional_embedding"], back["positional_embedding_res"])  # both whole


def test_round_trip_in_half_precision_bit_for_bit():
    state = {key: tensor.half() for key, tensor in checkpoint().items()}
    model = convert(state)
    assert model.dtype == torch.float32
    back = export(model.half())
    used = {"positional_embedding": slice(20), "positional_embedding_res": slice(20, None)}
    for key, tensor in state.items():
        rows = used.get(key, ...)
        assert back[key].dtype == torch.float16 and torch.equal(back[key][rows], tensor[rows]), key


def test_round_trip_from_a_model_bit_for_bit():
    model = convert(checkpoint())
    again = convert(export(model))
    assert again.config.to_dict() == model.config.to_dict()
    first, second = model.state_dict(), again.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_without_a_second_table():
    state = checkpoint()
    table = torch.cat([state["positional_embedding"][:20], state.pop("positional_embedding_res")[20:]])
    whole = convert({**state, "positional_embedding": table})
    both = convert(checkpoint())
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), both.state_dict().values(), strict=True))


def without(*parts):
    return {key: tensor for key, tensor in checkpoint().items() if not any(part in key for part in parts)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (checkpoint((), ()), "no tensor is an expert's"),
        (without("resblocks.1.experts.1"), r"transformer\.resblocks\.1 has experts \[0, 2\]: their numbers have gaps"),
        (without("visual.transformer.resblocks.2.experts.2"), r"different numbers of experts: \{1: 3, 2: 2\}"),
        (without("resblocks.1.gate"), r"transformer\.resblocks\.1 has 3 experts, but no gate"),
        (
            checkpoint() | {"transformer.resblocks.0.gate.weight": torch.zeros(4, WIDTH)},
            r"transformer\.resblocks\.0 has 3 experts, but a gate for 4 experts",
        ),
        (without("visual.transformer.resblocks.1.ln_2.bias"), r"missing from the source: vision_model.*layer_norm2"),
        (without("visual.transformer.resblocks.1."), r"visual\.transformer\.resblocks\.1 is missing: .* up to 2"),
        (checkpoint() | {"extra": torch.zeros(1)}, "left over in the source: extra"),
        (
            checkpoint() | {"transformer.resblocks.0.experts.1.c_fc.bias": torch.zeros(3)},
            r"of the wrong shape: transformer\.resblocks\.0\.experts\.0\.c_fc\.bias \(256,\)",
        ),
        (
            checkpoint() | {"positional_embedding_res": torch.zeros(77, WIDTH)},
            r"need one shape, but have \[\(248, 128\), \(77, 128\)\]",
        ),
        (
            checkpoint() | {"transformer.resblocks.0.mlp.gate.weight": torch.zeros(3, WIDTH)},
            r"both inside and outside of a module mlp: transformer\.resblocks\.0\.mlp\.gate\.weight",
        ),
        (  # no name twice, but one tower's experts inside and the other's outside
            {
                key: tensor
                for tower, inside in (("", "mlp."), ("visual.", ""))
                for key, tensor in checkpoint(inside=inside).items()
                if key.startswith("visual.") == bool(tower)
            },
            r"inside and outside of a module mlp: transformer\.resblocks\.0\.mlp\..*; visual\.transformer\.resbl",
        ),
        (
            checkpoint() | {"transformer.resblocks.0.gate.weight": torch.tensor(1.0)},
            r"transformer\.resblocks\.0 has 3 experts, but a gate of shape \(\)",
        ),
        (
            checkpoint() | {"transformer.resblocks.0.mlp.c_fc.weight": torch.zeros(2 * WIDTH, WIDTH)},
            r"left over in the source: transformer\.resblocks\.0\.mlp\.c_fc\.weight",
        ),
        (without("visual.proj"), r"missing visual\.proj"),
    ],
)
def test_what_is_no_checkpoint(state, message):
    with pytest.raises(ValueError, match=message):
        convert(state)


def test_what_the_layout_cannot_express():
    model = convert(checkpoint())
    model.config.vision_config.norm_topk_prob = False
    model.config.text_config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="hidden_act must be quick_gelu; norm_topk_prob must be True"):
        export(model)
    model = convert(checkpoint())
    model.config.vision_config.layer_norm_eps = 1e-6
    with pytest.raises(ValueError, match="cannot express this model: layer_norm_eps must be 1e-05"):
        export(model)
    model = convert(checkpoint())
    model.config.text_config.eos_token_id = VOCABULARY - 2
    model.config.vision_config.eval_capacity_factor = 1.0
    with pytest.raises(ValueError, match="pooled at the highest token id; eval_capacity_factor must be None"):
        export(model)
    with pytest.raises(ValueError, match="heads must be 64 wide.*fusion_gate must be False"):
        export(upcycle(tiny_clip(), PRESETS["clip_fmoe"]))


def test_commands_there_and_back(tmp_path, capsys):
    torch.save({key: tensor.half() for key, tensor in checkpoint().items()}, tmp_path / "released.pt")
    processor(image_size=8).save_pretrained(tmp_path / "processor")
    arguments = [str(tmp_path / "released.pt"), str(tmp_path / "model"), "--processor", str(tmp_path / "processor")]
    main(arguments)
    assert capsys.readouterr().out.count("largest difference") == 3
    model = AutoModel.from_pretrained(tmp_path / "model")
    assert isinstance(model, CLIPMoEModel) and model.config.text_config.max_position_embeddings == POSITIONS
    assert AutoProcessor.from_pretrained(tmp_path / "model").tokenizer.model_max_length == POSITIONS
    main([str(tmp_path / "model"), str(tmp_path / "back.pt"), "--reverse"])
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert torch.equal(back["visual.proj"], checkpoint()["visual.proj"].half().float())
    main([str(tmp_path / "back.pt"), str(tmp_path / "again")])
    again = AutoModel.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())


def test_safetensors_there_and_back_in_a_new_folder(tmp_path):
    save_file(checkpoint(), tmp_path / "released.safetensors")
    main([str(tmp_path / "released.safetensors"), str(tmp_path / "model")])
    main([str(tmp_path / "model"), str(tmp_path / "new" / "back.safetensors"), "--reverse"])
    back, exported = load_file(tmp_path / "new" / "back.safetensors"), export(convert(checkpoint()))
    assert back.keys() == exported.keys() and all(torch.equal(back[key], exported[key]) for key in back)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["back.safetensors"]


def test_a_wrong_checkpoint_never_gets_its_name(tmp_path, monkeypatch):
    convert(checkpoint()).save_pretrained(tmp_path / "model")
    name = "visual.transformer.resblocks.1.experts.2.c_fc.bias"
    monkeypatch.setattr(released_clip_moe, "export", lambda model: (state := export(model)) | {name: -state[name]})
    with pytest.raises(SystemExit, match="does not compute what the source does"):
        main([str(tmp_path / "model"), str(tmp_path / "back.pt"), "--reverse"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_commands_end_in_one_line(tmp_path):
    torchscript(checkpoint(), tmp_path / "script.pt")
    torch.save(without("resblocks.1.gate"), tmp_path / "broken.pt")
    (tmp_path / "there.pt").touch()
    for arguments, message in (
        ([str(tmp_path / "broken.pt"), str(tmp_path / "out")], "has 3 experts, but no gate"),
        ([str(tmp_path / "script.pt"), str(tmp_path / "out")], "is a TorchScript archive: what was released is a"),
        ([str(tmp_path / "nowhere.pt"), str(tmp_path / "out")], "there is no file"),
        (["training/symbol_clip", str(tmp_path / "new.pt"), "--reverse"], "a model of type 'clip_moe' is needed"),
        (["training/symbol_clip", str(tmp_path / "there.pt"), "--reverse"], "already exists"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code.startswith("error: ") and message in exit.value.code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.pt", "script.pt", "there.pt"]
