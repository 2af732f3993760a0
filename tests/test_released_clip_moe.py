"""The layout of the released CLIP-MoE checkpoints, there and back."""

import pytest
import torch
from openai_weights import VOCABULARY, released_state_dict
from tiny_clip import command, error_of, processor, tiny_clip
from transformers import AutoModel, AutoProcessor

import clip_moe
from clip_moe.conversion import openai, released_clip_moe
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.released_clip_moe import build, export
from clip_moe.conversion.upcycle import upcycle
from modeling_clip_moe import CLIPMoEModel

POSITIONS = 248
# The rows of the two tables that count
USED = {"positional_embedding": slice(20), "positional_embedding_res": slice(20, None)}


@pytest.fixture(scope="module")
def state():
    return released_state_dict()


@pytest.mark.parametrize(
    ("text_sparse", "vision_sparse", "top_k", "inside"),
    [((0, 1), (0, 1, 2), 2, ""), ((), (1, 2), 2, "mlp."), ((0, 1), (2,), 1, "")],
)
def test_computes_what_the_layout_says(text_sparse, vision_sparse, top_k, inside):
    model = build(released_state_dict(text_sparse, vision_sparse, inside), top_k)
    sparse = model.config.text_config.moe_layers, model.config.vision_config.moe_layers
    assert sparse == (list(text_sparse), list(vision_sparse))
    assert model.config.text_config.eos_token_id == 2 and model.config.router_aux_loss_coef == 0.01
    openai.verify(released_state_dict(text_sparse, vision_sparse), model)


def test_all_positions(state):
    """The last of 248 tokens sees the last row of the second table."""
    openai.verify(state, build(state))
    ids = torch.full((1, POSITIONS), 3).index_fill(1, torch.tensor([POSITIONS - 1]), VOCABULARY - 1)
    tables = {key: state[key].clone() for key in USED}
    with torch.no_grad():
        before = build(state).encode_text(ids)
        tables["positional_embedding"][20:] *= 2  # rows that are not used
        tables["positional_embedding_res"][:20] *= 2
        torch.testing.assert_close(build(state | tables).encode_text(ids), before)
        tables["positional_embedding_res"][-1] *= 2
        assert not torch.allclose(build(state | tables).encode_text(ids), before)
    whole = torch.cat([state["positional_embedding"][:20], state["positional_embedding_res"][20:]])
    alone = {key: whole if key in USED else tensor for key, tensor in state.items() if "_res" not in key}
    assert torch.equal(build(alone).encode_text(ids), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_round_trips_bit_for_bit(state, dtype):
    model = build({key: tensor.to(dtype) for key, tensor in state.items()})
    assert model.dtype == torch.float32
    back = export(model.to(dtype))
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        rows = USED.get(key, ...)
        assert back[key].dtype == dtype and torch.equal(back[key][rows], tensor.to(dtype)[rows]), key
    assert torch.equal(back["positional_embedding"], back["positional_embedding_res"])  # both whole
    again = build(back)
    assert again.config.to_dict() == build(state).config.to_dict()
    assert all(torch.equal(tensor, again.state_dict()[key].to(dtype)) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("experts", "missing transformer.resblocks.0.mlp.c_fc.weight"),
        ("visual.transformer.resblocks.2.experts.2", r"layers\.2\..*must be \(3, 256, 64\)"),
        ("resblocks.1.gate", r"missing from the source: text_model.*layers\.1\.mlp\.router\.weight"),
    ],
)
def test_what_is_no_checkpoint(state, without, message):
    with pytest.raises(ValueError, match=message):
        build({key: tensor for key, tensor in state.items() if without not in key})


def test_what_the_layout_cannot_express(state):
    model = build(state)
    model.config.vision_config.norm_topk_prob, model.config.text_config.eos_token_id = False, VOCABULARY - 2
    with pytest.raises(ValueError, match="this model: texts must be pooled at the highest .*; norm_topk_prob must be"):
        export(model)
    with pytest.raises(ValueError, match="heads must be 64 wide.*fusion_gate must be False"):
        export(upcycle(tiny_clip(), PRESETS["clip_fmoe"]))


def test_commands_there_and_back(state, tmp_path, capsys):
    torch.save({key: tensor.half() for key, tensor in state.items()}, tmp_path / "released.pt")
    processor(image_size=8).save_pretrained(tmp_path / "processor")
    options = "--checkpoint", tmp_path / "released.pt", "--processor", tmp_path / "processor"
    command("released-clip-moe", tmp_path / "model", *options)
    assert capsys.readouterr().out.count("largest difference") == 3
    model = AutoModel.from_pretrained(tmp_path / "model")
    assert isinstance(model, CLIPMoEModel) and model.config.text_config.max_position_embeddings == POSITIONS
    assert AutoProcessor.from_pretrained(tmp_path / "model").tokenizer.model_max_length == POSITIONS
    command("export-released", tmp_path / "back", "--model", tmp_path / "model")
    back = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert torch.equal(back["visual.proj"], state["visual.proj"].half().float())
    command("released-clip-moe", tmp_path / "again", "--checkpoint", tmp_path / "back" / "checkpoint.pt")
    again = AutoModel.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())


def test_a_wrong_checkpoint_never_gets_its_name(state, tmp_path, monkeypatch):
    build(state).save_pretrained(tmp_path / "model")
    name = "visual.transformer.resblocks.1.experts.2.c_fc.bias"
    monkeypatch.setattr(released_clip_moe, "export", lambda model: (state := export(model)) | {name: -10 * state[name]})
    error = error_of(clip_moe.main, "export-released", tmp_path / "back", "--model", tmp_path / "model")
    assert "differ from the source" in error and not (tmp_path / "back").exists()
