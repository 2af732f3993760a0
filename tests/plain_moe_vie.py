"""
MoE-ViE (arXiv:2608.17402) as plain as it can be, on a state dict of the authors' names and shapes: one image or text at
a time, one token after another, in the precision of its tensors. Written from the paper's facts; no code is theirs.

`shapes(sizes)` has the names and shapes of a released file, `random_weights` tensors for them, `encode_image` and
`encode_text` what the model makes of an image and a text, with what went through its layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, silu


@dataclass(frozen=True)
class Sizes:
    """Those of a model: of its image tower, its experts, and its text tower. `ffn` and `text_ffn` are the widths of
    dense FFNs, `top_k` the routed experts of a token. Without experts, all layers are dense."""

    width: int
    layers: int
    heads: int
    patch: int
    image: int
    ffn: int
    pooling_heads: int
    expert: int
    experts: int
    top_k: int
    text_width: int
    text_layers: int
    text_heads: int
    text_ffn: int
    embedding: int = 1024
    vocabulary: int = 49_408
    length: int = 144


RELEASED = {
    "B/16": Sizes(768, 12, 12, 16, 224, 2048, 8, 512, 31, 3, 1024, 24, 16, 2730),
    "L/16": Sizes(1024, 24, 16, 16, 384, 2736, 8, 684, 31, 3, 1024, 24, 16, 2736),
    "H/14": Sizes(1280, 32, 16, 14, 448, 3413, 16, 854, 31, 7, 1408, 34, 16, 3754),
}
TINY = Sizes(32, 3, 2, 4, 8, 42, 4, 11, 7, 3, 24, 2, 3, 30, embedding=16, vocabulary=40, length=8)


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _attention(name: str, width: int) -> dict[str, tuple[int, ...]]:
    packed = {f"{name}.in_proj_weight": (3 * width, width), f"{name}.in_proj_bias": (3 * width,)}
    return packed | _linear(f"{name}.out_proj", width, width)


def _gated_ffn(name: str, width: int, hidden: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    first = [_linear(f"{name}.{part}_proj", width, hidden, bias) for part in ("gate", "up")]
    return first[0] | first[1] | _linear(f"{name}.down_proj", hidden, width, bias)


def _layer(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return _norm(f"{name}.attn.ln", width) | _attention(f"{name}.attn.attn", width) | _norm(f"{name}.mlp.ln", width)


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a file."""
    width, text = sizes.width, sizes.text_width
    found = {"visual.conv1.weight": (width, 3, sizes.patch, sizes.patch)} | _norm("visual.ln_pre", width)
    for number in range(sizes.layers):
        layer = f"visual.transformer.resblocks.{number}"
        found |= _layer(layer, width) | {f"{layer}.attn.attn.rope.freqs": (width // sizes.heads // 4,)}
        if number == 0 or not sizes.experts:
            found |= _gated_ffn(f"{layer}.mlp.mlp", width, sizes.ffn)
            continue
        moe = f"{layer}.mlp.moe"
        found |= {
            f"{moe}.w1": (sizes.experts, 2 * sizes.expert, width),
            f"{moe}.w2": (sizes.experts, width, sizes.expert),
            f"{moe}.expert_bias": (sizes.experts,),
        }
        found |= _linear(f"{moe}._gate_module", width, sizes.experts, bias=False)
        found |= _gated_ffn(f"{moe}._shared_module", width, sizes.expert, bias=False)
    pooling = "visual.attn_pool"
    found |= {f"{pooling}.probe": (1, 1, width)} | _attention(f"{pooling}.attn", width)
    found |= _norm(f"{pooling}.layernorm", width) | _linear(f"{pooling}.mlp.c_fc", width, 4 * width)
    found |= _linear(f"{pooling}.mlp.c_proj", 4 * width, width) | {"visual.proj": (width, sizes.embedding)}
    for number in range(sizes.text_layers):
        layer = f"transformer.resblocks.{number}"
        found |= _layer(layer, text) | _gated_ffn(f"{layer}.mlp.mlp", text, sizes.text_ffn)
    tables = {"token_embedding.weight": (sizes.vocabulary, text), "positional_embedding": (sizes.length, text)}
    return found | tables | {"text_projection": (text, sizes.embedding), "logit_scale": ()}


def random_weights(sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random tensors of all these shapes; frequencies are what they are in released files."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(sizes).items():
        if name.endswith("rope.freqs"):
            half = sizes.width // sizes.heads // 2
            state[name] = torch.tensor([10_000 ** (-2 * i / half) for i in range(half // 2)], dtype=dtype)
        else:
            center = 1.0 if ".ln" in name and name.endswith("weight") else 0.0
            state[name] = center + torch.randn(shape, generator=generator, dtype=dtype) / 4
    return state


def _normed(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    return layer_norm(tokens, tokens.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)


def _apply(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    return linear(tokens, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _gated(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    gate, up = (_apply(state, f"{name}.{part}_proj", tokens) for part in ("gate", "up"))
    return _apply(state, f"{name}.down_proj", silu(gate) * up)


def _turned(head: Tensor, place: tuple[int, int], freqs: Tensor) -> Tensor:
    """A query or key of one head at a row and a column. The first half of its channels turns by the column + 1, the
    second by the row + 1, channels 2 i and 2 i + 1 of a half together by frequency i."""
    row, column = place
    turned, half = head.clone(), len(head) // 2
    for start, position in ((0, column + 1), (half, row + 1)):
        for i, frequency in enumerate(freqs):
            angle, a, b = position * frequency, start + 2 * i, start + 2 * i + 1
            turned[a] = head[a] * angle.cos() - head[b] * angle.sin()
            turned[b] = head[b] * angle.cos() + head[a] * angle.sin()
    return turned


def _attend(state, name, queries_of, tokens, heads, places=None, causal=False) -> Tensor:
    """Attention of `queries_of` (Q, D) to tokens (S, D), head by head and query by query."""
    width = tokens.shape[-1]
    size, weights, biases = width // heads, *(state[f"{name}.in_proj_{kind}"].chunk(3) for kind in ("weight", "bias"))
    queries = linear(queries_of, weights[0], biases[0])
    keys, values = (linear(tokens, weights[i], biases[i]) for i in (1, 2))
    output = torch.zeros_like(queries)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        q, k, v = queries[:, part], keys[:, part], values[:, part]
        if places:
            freqs = state[f"{name}.rope.freqs"]
            q, k = (torch.stack([_turned(*pair, freqs) for pair in zip(x, places, strict=True)]) for x in (q, k))
        for number, query in enumerate(q):
            seen = number + 1 if causal else len(k)
            output[number, part] = (k[:seen] @ query * size**-0.5).softmax(0) @ v[:seen]
    return _apply(state, f"{name}.out_proj", output)


def _sparse_ffn(state: dict[str, Tensor], name: str, tokens: Tensor, top_k: int) -> tuple[Tensor, list[list[int]]]:
    """Token by token: the chosen experts, best first, weighed by their scores over the sum of these, and the shared
    one."""
    outputs, chosen = [], []
    for token in tokens:
        scores = _apply(state, f"{name}._gate_module", token).sigmoid()
        ids = (scores + state[f"{name}.expert_bias"]).argsort(descending=True)[:top_k].tolist()
        output, total = _gated(state, f"{name}._shared_module", token), sum(scores[e] for e in ids)
        for e in ids:
            gate, up = (state[f"{name}.w1"][e] @ token).chunk(2)
            output = output + scores[e] / total * (state[f"{name}.w2"][e] @ (silu(gate) * up))
        outputs.append(output)
        chosen.append(ids)
    return torch.stack(outputs), chosen


def encode_image(state: dict[str, Tensor], image: Tensor, sizes: Sizes) -> tuple[Tensor, list[Tensor], list]:
    """The embedding of an image (3, height, width), the tokens before the first layer and after each, and the experts
    of each sparse layer and token."""
    size, patches, places = sizes.patch, [], []
    for row in range(image.shape[1] // size):
        for column in range(image.shape[2] // size):
            patch = image[:, row * size : (row + 1) * size, column * size : (column + 1) * size]
            patches.append((state["visual.conv1.weight"] * patch).sum(dim=(1, 2, 3)))
            places.append((row, column))
    tokens = _normed(state, "visual.ln_pre", torch.stack(patches))
    states, experts = [tokens], []
    for number in range(sizes.layers):
        layer = f"visual.transformer.resblocks.{number}"
        normed = _normed(state, f"{layer}.attn.ln", tokens)
        tokens = tokens + _attend(state, f"{layer}.attn.attn", normed, normed, sizes.heads, places)
        normed = _normed(state, f"{layer}.mlp.ln", tokens)
        if f"{layer}.mlp.moe.w1" in state:
            update, chosen = _sparse_ffn(state, f"{layer}.mlp.moe", normed, sizes.top_k)
            experts.append(chosen)
        else:
            update = _gated(state, f"{layer}.mlp.mlp", normed)
        tokens = tokens + update
        states.append(tokens)
    pooling = "visual.attn_pool"
    pooled = _attend(state, f"{pooling}.attn", state[f"{pooling}.probe"][0], tokens, sizes.pooling_heads)[0]
    hidden = gelu(_apply(state, f"{pooling}.mlp.c_fc", _normed(state, f"{pooling}.layernorm", pooled)))
    return (pooled + _apply(state, f"{pooling}.mlp.c_proj", hidden)) @ state["visual.proj"], states, experts


def encode_text(state: dict[str, Tensor], ids: Tensor, sizes: Sizes) -> tuple[Tensor, list[Tensor]]:
    """The embedding of a text (S,), which is that of its largest id, and the tokens before the first layer and after
    each."""
    tokens = state["token_embedding.weight"][ids] + state["positional_embedding"][: len(ids)]
    states = [tokens]
    for number in range(sizes.text_layers):
        layer = f"transformer.resblocks.{number}"
        normed = _normed(state, f"{layer}.attn.ln", tokens)
        tokens = tokens + _attend(state, f"{layer}.attn.attn", normed, normed, sizes.text_heads, causal=True)
        tokens = tokens + _gated(state, f"{layer}.mlp.mlp", _normed(state, f"{layer}.mlp.ln", tokens))
        states.append(tokens)
    return tokens[ids.argmax()] @ state["text_projection"], states
