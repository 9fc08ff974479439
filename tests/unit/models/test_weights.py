"""A rank reads the bytes of its slices, all of them and no others."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config_fields import CheckpointRefused
from models.parallel import Part, Piece, even_part, head_part
from models.weights import CheckpointReader
from tests.tiny import make_target
from tests.unit.models.conftest import PairMaker
from tests.unit.models.ranks import fake_rank, load_drafter_rank, load_target_rank

WEIGHT = torch.arange(60.0).view(10, 6)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"w": WEIGHT, "norm": torch.ones(6)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_even_slices_cover_a_tensor_once(checkpoint: Path, dim: int, size: int) -> None:
    parts, bytes_read = [], 0
    for rank in range(size):
        part = even_part(WEIGHT.shape[dim], fake_rank(rank, size), dim)
        with CheckpointReader(checkpoint) as reader:
            parts.append(reader.read("w", part))
            rank_bytes = sum(piece.stop - piece.start for piece in part.pieces) * 4
            assert reader.bytes_read == rank_bytes * WEIGHT.shape[1 - dim]
            bytes_read += reader.bytes_read
    assert bytes_read == WEIGHT.numel() * 4
    joined = torch.cat(parts, dim)
    assert len({part.shape for part in parts}) == 1
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(joined.narrow(dim, 0, WEIGHT.shape[dim]), WEIGHT)
    assert not joined.narrow(dim, WEIGHT.shape[dim], joined.shape[dim] - WEIGHT.shape[dim]).any()


def test_heads_are_read_piece_by_piece(checkpoint: Path) -> None:
    with CheckpointReader(checkpoint) as reader:
        found = reader.read("w", head_part((4, None, 0, 1), 2, dim=0))
        assert reader.bytes_read == 6 * 6 * 4
    expected = torch.zeros(8, 6)
    expected[:2], expected[4:] = WEIGHT[8:], WEIGHT[:4]
    assert torch.equal(found, expected)


def test_a_part_of_padding_reads_nothing(checkpoint: Path) -> None:
    with CheckpointReader(checkpoint) as reader:
        found = reader.read("w", head_part((None, None), 2, dim=1), torch.bfloat16)
        assert reader.bytes_read == 0
    assert found.shape == (10, 4)
    assert found.dtype == torch.bfloat16
    assert not found.any()


def test_values_are_cast_and_bytes_counted_as_stored(checkpoint: Path) -> None:
    with CheckpointReader(checkpoint) as reader:
        whole = reader.read("w", None, torch.bfloat16)
        part = reader.read("w", even_part(10, fake_rank(1, 2), 0), torch.bfloat16)
        assert reader.bytes_read == 60 * 4 + 30 * 4
        assert reader.names_read == {"w"}
        assert reader.names == {"w", "norm"}
    assert whole.shape == (10, 6)
    assert torch.equal(whole, WEIGHT.bfloat16())
    assert torch.equal(part, WEIGHT[5:].bfloat16())


def stored_bytes(directory: Path) -> dict[str, int]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


# 9 query and 3 KV heads, and dimensions that none of these sizes divides.
ODD_SIZES = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "hidden_size": 45,
    "intermediate_size": 65,
    "vocab_size": 301,
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
def test_ranks_together_read_a_checkpoint_once(pair: PairMaker, kind: str, size: int) -> None:
    for directory, is_drafter in zip(pair(kind, **ODD_SIZES), (False, True), strict=True):
        total = 0
        for rank in range(size):
            tp = fake_rank(rank, size)
            target = load_target_rank(pair(kind, **ODD_SIZES)[0], tp=tp)
            with CheckpointReader(directory) as reader:
                if is_drafter:
                    load_drafter_rank(directory, target, tp=tp, reader=reader)
                else:
                    load_target_rank(directory, tp=tp, reader=reader)
                total += reader.bytes_read
                assert reader.names_read == reader.names
        stored = stored_bytes(directory)
        replicated = sum(size_ for name, size_ in stored.items() if "norm" in name)
        assert total == sum(stored.values()) + (size - 1) * replicated


@pytest.mark.parametrize("size", [4, 6])
def test_replicated_kv_heads_are_read_by_each_of_their_ranks(pair: PairMaker, size: int) -> None:
    directory, _ = pair("llama", num_heads=4, num_kv_heads=2)
    total = 0
    for rank in range(size):
        with CheckpointReader(directory) as reader:
            load_target_rank(directory, tp=fake_rank(rank, size), reader=reader)
            total += reader.bytes_read
    stored = stored_bytes(directory)
    replicated = sum(b for name, b in stored.items() if "norm" in name)
    kv = sum(b for name, b in stored.items() if "k_proj" in name or "v_proj" in name)
    assert total == sum(stored.values()) + (size - 1) * replicated + (size // 2 - 1) * kv


def test_a_split_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    whole = make_target(tmp_path / "whole", "qwen3")
    split = make_target(tmp_path / "split", "qwen3", max_shard_size="60KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    tensors = load_file(whole / "model.safetensors")
    with CheckpointReader(split) as reader:
        assert reader.names == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name), tensor)
        assert reader.bytes_read == sum(prod(tensor.shape) * 4 for tensor in tensors.values())


def test_several_files_without_an_index_are_all_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert reader.names == {"a", "b"}
        assert reader.read("b").shape == (3,)


def test_a_file_that_the_index_names_and_is_not_there_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with (
        pytest.raises(CheckpointRefused, match=r"two\.safetensors"),
        CheckpointReader(tmp_path) as reader,
    ):
        reader.read("b")


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointRefused, match=r"no \*\.safetensors"):
        CheckpointReader(tmp_path)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    with (
        pytest.raises(CheckpointRefused, match="tensor lost is missing"),
        CheckpointReader(checkpoint) as reader,
    ):
        reader.read("lost")


@pytest.mark.parametrize(
    "part", [Part(0, 11, (Piece(0, 11, 0),)), Part(1, 2, (Piece(5, 7, 0),)), Part(2, 1, ())]
)
def test_a_tensor_too_small_for_the_part_is_refused(checkpoint: Path, part: Part) -> None:
    with (
        CheckpointReader(checkpoint) as reader,
        pytest.raises(CheckpointRefused, match=r"w has shape .10, 6"),
    ):
        reader.read("w", part)


def resized(source: Path, copy: Path, name: str, shape: tuple[int, ...]) -> Path:
    """A checkpoint whose tensor `name` has another shape than its config says."""
    tensors = load_file(source / "model.safetensors")
    assert tensors[name].shape != shape
    tensors[name] = torch.ones(shape)
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text((source / "config.json").read_text())
    return copy


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (301, 32)),
        ("lm_head.weight", (300, 33)),
        ("model.norm.weight", (1,)),
        ("model.layers.1.self_attn.q_proj.weight", (80, 32)),
        ("model.layers.1.self_attn.o_proj.weight", (32, 80)),
        ("model.layers.1.self_attn.q_norm.weight", (1,)),
        ("model.layers.1.mlp.up_proj.weight", (65, 32)),
    ],
)
def test_a_target_tensor_that_contradicts_the_config_is_refused(
    tmp_path: Path, pair: PairMaker, name: str, shape: tuple[int, ...]
) -> None:
    """To read a corner of it, or to broadcast it, would half-work."""
    copy = resized(pair("qwen3")[0], tmp_path, name, shape)
    with pytest.raises(CheckpointRefused, match=name):
        load_target_rank(copy)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (32, 128)),
        ("hidden_norm.weight", (1,)),
        ("layers.1.self_attn.v_proj.weight", (48, 32)),
        ("layers.1.mlp.gate_proj.weight", (65, 32)),
    ],
)
def test_a_drafter_tensor_that_contradicts_the_config_is_refused(
    tmp_path: Path, pair: PairMaker, name: str, shape: tuple[int, ...]
) -> None:
    target = load_target_rank(pair("qwen3")[0])
    copy = resized(pair("qwen3")[1], tmp_path, name, shape)
    with pytest.raises(CheckpointRefused, match=name):
        load_drafter_rank(copy, target)


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"w": "../other/model.safetensors"}}',
        '{"weight_map": {"w": "/etc/model.safetensors"}}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": ["w"]}',
        "{}",
        "{",
    ],
)
def test_an_index_that_is_none_or_leads_out_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointRefused, match=r"model\.safetensors\.index\.json|weight_map"):
        CheckpointReader(tmp_path)
