"""Rotary tables against transformers', the rotation against a loop."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models.config import DecoderConfig, RopeConfig
from models.rope import rope_table, rotate

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARAMETERS: list[tuple[str, float, int, dict[str, Any]]] = [
    ("default", 10000.0, 16, {}),
    ("default", 500.0, 64, {}),
    ("linear", 10000.0, 16, {"factor": 4.0}),
    ("linear", 1e6, 32, {"factor": 2.5}),
    ("llama3", 10000.0, 16, {**LLAMA3, "original_max_position_embeddings": 32}),
    ("llama3", 500000.0, 128, {**LLAMA3, "original_max_position_embeddings": 8192}),
    (
        "llama3",
        500000.0,
        64,
        {
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 100,
        },
    ),
    ("yarn", 10000.0, 16, {"factor": 4.0, "original_max_position_embeddings": 32}),
    ("yarn", 1e6, 128, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    (
        "yarn",
        10000.0,
        64,
        {
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
    (
        "yarn",
        10000.0,
        32,
        {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    ),
    (
        "yarn",
        10000.0,
        32,
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    (
        "yarn",
        150000.0,
        64,
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
]


def decoder(kind: str, theta: float, head_dim: int, parameters: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(
        num_layers=1,
        hidden_size=4 * head_dim,
        intermediate_size=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind=kind, theta=theta, parameters=parameters),
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
        max_position_embeddings=512,
    )


@pytest.mark.parametrize(("kind", "theta", "head_dim", "parameters"), PARAMETERS)
def test_tables_equal_those_of_transformers(
    kind: str, theta: float, head_dim: int, parameters: dict[str, Any]
) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    positions = torch.arange(300)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    cos, sin = rope_table(decoder(kind, theta, head_dim, parameters), 300)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (300, head_dim)
    # An angle near 300 has a spacing of 3e-5 in float32.
    torch.testing.assert_close(cos, theirs[0][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(sin, theirs[1][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "theta", "head_dim", "parameters"), PARAMETERS[2:])
def test_scaling_shows(kind: str, theta: float, head_dim: int, parameters: dict[str, Any]) -> None:
    """So that the comparison above is not between two default tables."""
    plain = rope_table(decoder("default", theta, head_dim, {}), 300)[1]
    scaled = rope_table(decoder(kind, theta, head_dim, parameters), 300)[1]
    assert (plain - scaled).abs().max() > 0.01


def test_yarn_without_an_original_length_takes_the_models() -> None:
    implied = rope_table(decoder("yarn", 10000.0, 16, {"factor": 4.0}), 40)
    explicit = {"factor": 4.0, "original_max_position_embeddings": 512}
    expected = rope_table(decoder("yarn", 10000.0, 16, explicit), 40)
    assert torch.equal(implied[0], expected[0])


def test_rotation_equals_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, heads, dim = 3, 2, 8
    x = torch.randn(tokens, heads, dim, generator=generator)
    angles = torch.randn(tokens, dim // 2, generator=generator).repeat(1, 2)
    found = rotate(x, angles.cos(), angles.sin())
    for token in range(tokens):
        for head in range(heads):
            for i in range(dim // 2):
                a, b = float(x[token, head, i]), float(x[token, head, i + dim // 2])
                angle = float(angles[token, i])
                turned = found[token, head, [i, i + dim // 2]].tolist()
                assert turned[0] == pytest.approx(a * math.cos(angle) - b * math.sin(angle), 1e-5)
                assert turned[1] == pytest.approx(b * math.cos(angle) + a * math.sin(angle), 1e-5)


def test_rotation_in_bfloat16_is_that_of_transformers() -> None:
    x = torch.randn(5, 2, 16, dtype=torch.bfloat16)
    cos, sin = rope_table(decoder("default", 10000.0, 16, {}), 5)
    theirs, _ = apply_rotary_pos_emb(
        x.transpose(0, 1), x.transpose(0, 1), cos.bfloat16(), sin.bfloat16(), unsqueeze_dim=0
    )
    assert torch.equal(rotate(x, cos, sin), theirs.transpose(0, 1))
