"""Layers against formulas, and every tensor-parallel size against one rank."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from models.config import load_target_config
from models.layers import MLP, Attention, DecoderLayer, Embedding, LMHead, rms_norm
from models.parallel import TensorParallel, even_part
from models.rope import rope_table
from models.weights import CheckpointReader
from tests.unit.models.conftest import PairMaker
from tests.unit.models.ranks import TORCH, run_ranks

# 9 query and 3 KV heads, and widths that 2 and 4 do not divide.
ODD_SIZES = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "hidden_size": 45,
    "intermediate_size": 65,
    "vocab_size": 301,
}
SIZES = range(1, 10)


def test_rms_norm_equals_a_loop() -> None:
    x, weight = torch.randn(3, 6), torch.randn(6)
    found = rms_norm(x, weight, 0.1)
    for row, values in zip(found.tolist(), x.tolist(), strict=True):
        scale = (sum(v * v for v in values) / 6 + 0.1) ** -0.5
        expected = [v * scale * w for v, w in zip(values, weight.tolist(), strict=True)]
        assert row == pytest.approx(expected, rel=1e-5)


def test_rms_norm_in_bfloat16_is_that_of_transformers() -> None:
    norm = Qwen3RMSNorm(32, eps=1e-6).bfloat16()
    norm.weight.data = torch.randn(32).bfloat16()
    x = (100 * torch.randn(7, 32)).bfloat16()
    found = rms_norm(x, norm.weight.data, 1e-6)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, norm(x))


@pytest.mark.parametrize("size", SIZES)
def test_embedding_is_the_same_on_every_rank(pair: PairMaker, size: int) -> None:
    directory, _ = pair("llama", **ODD_SIZES)
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.tensor([[0, 1, 300], [150, 151, 299]], dtype=torch.int32)

    def work(tp: TensorParallel) -> Tensor:
        with CheckpointReader(directory) as reader:
            embed = Embedding(301, 45, tp, reader, "model.embed_tokens.weight", torch.float32)
        return embed(ids)

    for found in run_ranks(size, work):
        assert torch.equal(found, table[ids.long()])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [5, 12])
def test_head_shards_the_vocabulary_and_pads_it_with_minus_infinity(
    vocab_size: int, size: int
) -> None:
    weight, hidden = torch.randn(vocab_size, 8), torch.randn(3, 8)
    width = even_part(vocab_size, TensorParallel(), 0).size // size + (vocab_size % size > 0)

    def work(tp: TensorParallel) -> Tensor:
        local = torch.zeros(width, 8)
        mine = weight[tp.rank * width : (tp.rank + 1) * width]
        local[: len(mine)] = mine
        return LMHead(local, vocab_size, tp, TORCH)(hidden)

    logits = torch.cat(run_ranks(size, work), dim=1)
    torch.testing.assert_close(logits[:, :vocab_size], hidden @ weight.t())
    assert (logits[:, vocab_size:] == float("-inf")).all()


@pytest.mark.parametrize("biases", [False, True])
def test_mlp_equals_its_formula_at_every_size(pair: PairMaker, biases: bool) -> None:
    directory, _ = pair("llama", **ODD_SIZES, biases=biases)
    config, prefix = load_target_config(directory).decoder, "model.layers.1.mlp"
    weights = load_file(directory / "model.safetensors")
    x = torch.randn(4, 45)

    def linear(name: str, rows: Tensor) -> Tensor:
        bias = weights[f"{prefix}.{name}.bias"] if biases else 0.0
        return rows @ weights[f"{prefix}.{name}.weight"].t() + bias

    gate = linear("gate_proj", x)
    expected = linear("down_proj", gate * gate.sigmoid() * linear("up_proj", x))

    def work(tp: TensorParallel) -> Tensor:
        with CheckpointReader(directory) as reader:
            return MLP(config, tp, reader, prefix, torch.float32, TORCH)(x)

    for size in SIZES:
        for found in run_ranks(size, work):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def self_attention(layer: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every token over every token, by plain matrices, from the layer's own q, k, v."""
    q, k, v = layer.project(x, cos, sin)
    scores = torch.einsum("qhgd,khd->hgqk", q, k) / q.shape[-1] ** 0.5
    mixed = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v)
    return layer.output(mixed.flatten(1))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 2), (6, 1), (5, 5)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_attention_is_the_same_at_every_size(
    pair: PairMaker, kind: str, num_heads: int, num_kv_heads: int
) -> None:
    directory, _ = pair(
        kind, num_heads=num_heads, num_kv_heads=num_kv_heads, hidden_size=180, biases=True
    )
    config = load_target_config(directory).decoder
    cos, sin = rope_table(config, 4)
    x = torch.randn(4, 180)

    def run(tp: TensorParallel) -> tuple[Tensor, int]:
        with CheckpointReader(directory) as reader:
            layer = Attention(config, tp, reader, "model.layers.0.self_attn", torch.float32, TORCH)
        assert layer.kv_weight().shape[0] == 2 * layer.kv_spec().num_kv_heads * config.head_dim
        return self_attention(layer, x, cos, sin), layer.kv_spec().num_kv_heads

    ((expected, all_heads),) = run_ranks(1, run)
    assert all_heads == num_kv_heads
    for size in SIZES[1:]:
        results = run_ranks(size, run)
        assert {heads for _, heads in results} == {-(-num_kv_heads // size)}
        for found, _ in results:
            scale = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale)


def test_kv_weight_is_the_rows_of_k_then_v(pair: PairMaker) -> None:
    directory, _ = pair("qwen3", biases=True)
    weights = load_file(directory / "model.safetensors")
    prefix = "model.layers.2.self_attn"
    with CheckpointReader(directory) as reader:
        config = load_target_config(directory).decoder
        layer = Attention(config, TensorParallel(), reader, prefix, torch.float32, TORCH)
    bias = layer.kv_bias()
    assert bias is not None
    for kind, found in (("weight", layer.kv_weight()), ("bias", bias)):
        rows = [weights[f"{prefix}.{name}.{kind}"] for name in ("k_proj", "v_proj")]
        assert torch.equal(found, torch.cat(rows))


def test_a_layer_adds_attention_then_mlp_to_its_residual(pair: PairMaker) -> None:
    directory, _ = pair("llama")
    config = load_target_config(directory).decoder
    weights = load_file(directory / "model.safetensors")
    with CheckpointReader(directory) as reader:
        layer = DecoderLayer(
            config, TensorParallel(), reader, "model.layers.0", torch.float32, TORCH
        )
    hidden, attended = torch.randn(3, 32), torch.randn(3, 64)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, weights[f"model.layers.0.{name}.weight"], config.rms_norm_eps)

    middle = hidden + attended @ weights["model.layers.0.self_attn.o_proj.weight"].t()
    expected = middle + layer.mlp(norm(middle, "post_attention_layernorm"))
    torch.testing.assert_close(layer.finish(hidden, attended), expected)

    cos, sin = rope_table(config, 3)
    normed = norm(hidden, "input_layernorm")
    for found, wanted in zip(
        layer.project(hidden, cos, sin), layer.attention.project(normed, cos, sin), strict=True
    ):
        torch.testing.assert_close(found, wanted)
