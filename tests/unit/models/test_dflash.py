"""The drafter against the oracle: injected context, the block, its head, what is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config_fields import CheckpointRefused
from models.dflash import DFlashDrafter
from models.kv_cache import LayerKV, allocate
from models.parallel import TensorParallel
from models.proposal import query_blocks
from tests.oracle.dflash_reference import (
    ReferenceDrafter,
    draft_logits,
    embed_block,
    load_drafter,
    propose,
)
from tests.tiny import LLAMA3_ROPE, Kind, load_target
from tests.unit.models.conftest import Pair, PairMaker
from tests.unit.models.ranks import ONE, load_drafter_rank, load_target_rank, run_ranks

PAGE, FEATURES = 4, 3 * 32
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def random_aux(length: int, seed: int = 0, features: int = FEATURES) -> Tensor:
    return torch.randn(length, features, generator=torch.Generator().manual_seed(seed))


def load(pair: Pair, tp: TensorParallel = ONE) -> DFlashDrafter:
    return load_drafter_rank(pair[1], load_target_rank(pair[0], tp=tp), tp=tp)


def pool(drafter: DFlashDrafter) -> list[LayerKV]:
    return allocate(drafter.kv_specs(), num_pages=12, page_size=PAGE)


def inject(
    drafter: DFlashDrafter, kv: list[LayerKV], table: Tensor, aux: Tensor, start: int = 0
) -> None:
    positions = torch.arange(start, start + len(aux), dtype=torch.int32)
    slots = table[positions // PAGE] * PAGE + positions % PAGE
    drafter.inject(aux, positions, slots, kv)


def block(
    drafter: DFlashDrafter,
    kv: list[LayerKV],
    tables: list[Tensor],
    bonus: list[int],
    lens: list[int],
) -> tuple[Tensor, Tensor]:
    """Hidden states and drafts of one block for each table."""
    config = drafter.config
    blocks = query_blocks(
        torch.tensor(bonus, dtype=torch.int32), config.num_drafts, config.mask_token_id
    )
    context_lens = torch.tensor(lens, dtype=torch.int32)
    context = drafter.ops.block_context(
        torch.stack(tables),
        torch.arange(len(tables), dtype=torch.int32),
        context_lens,
        config.block_size,
        PAGE,
        len(tables[0]),
    )
    hidden = drafter.block_hidden(blocks, context_lens, context, kv)
    return hidden, drafter.draft_tokens(drafter.draft_logits(hidden, config.num_drafts))


def oracle_hidden(target: Any, drafter: ReferenceDrafter, bonus: int, aux: Tensor) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = drafter(embed_block(target, drafter, bonus), aux)
    return hidden


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


TABLES = [
    torch.tensor([3, 1, 5, 2], dtype=torch.int32),
    torch.tensor([7, 4, 6, 8], dtype=torch.int32),
]

VARIANTS: list[tuple[Kind, dict[str, Any]]] = [
    ("llama", {}),
    ("llama-tied", {"attention_bias": True}),
    ("qwen3", {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "num_layers": 3}),
    ("qwen3", {"with_mask_embedding": True}),
    ("llama3", {"rope_parameters": dict(LLAMA3_ROPE)}),
    ("llama3", {"rope_parameters": YARN}),
    ("llama", {"config_overrides": {"rope_scaling": {"type": "linear", "factor": 3.0}}}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_inject_then_block_equals_the_oracle(
    pair: PairMaker, kind: Kind, options: dict[str, Any]
) -> None:
    directories = pair(kind, drafter_options=options)
    target, oracle = load_target(directories[0]), load_drafter(directories[1])
    drafter = load(directories)
    kv, lens, bonus = pool(drafter), [9, 12], [17, 299]
    auxs = [random_aux(length, seed=length) for length in lens]
    for table, aux in zip(TABLES, auxs, strict=True):
        inject(drafter, kv, table, aux)
    hidden, drafts = block(drafter, kv, TABLES, bonus, lens)
    assert drafts.dtype == torch.int32
    for row, (token, aux) in enumerate(zip(bonus, auxs, strict=True)):
        assert_near(hidden[row], oracle_hidden(target, oracle, token, aux))
        assert drafts[row].tolist() == propose(target, oracle, token, aux)
        with torch.no_grad():
            logits = draft_logits(target, oracle, token, aux)
        assert_near(drafter.draft_logits(hidden, len(logits))[row], logits)
        few = drafter.draft_logits(hidden, 1)[row]
        assert_near(few, logits[:1])


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE])
def test_context_lengths_at_page_edges(pair: PairMaker, length: int) -> None:
    directories = pair("qwen3")
    drafter = load(directories)
    kv, aux = pool(drafter), random_aux(length)
    inject(drafter, kv, TABLES[0], aux)
    hidden, _ = block(drafter, kv, TABLES[:1], [5], [length])
    expected = oracle_hidden(load_target(directories[0]), load_drafter(directories[1]), 5, aux)
    assert_near(hidden[0], expected)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 5], [3, 6]])
def test_injection_in_chunks_equals_whole(pair: PairMaker, chunks: list[int]) -> None:
    drafter, aux = load(pair("qwen3")), random_aux(9)
    whole, in_chunks = pool(drafter), pool(drafter)
    inject(drafter, whole, TABLES[0], aux)
    start = 0
    for part in aux.split(chunks):
        inject(drafter, in_chunks, TABLES[0], part, start)
        start += len(part)
    for one, other in zip(whole, in_chunks, strict=True):
        assert one.k.any()
        assert_near(other.k, one.k)
        assert_near(other.v, one.v)


def test_context_beyond_its_length_is_invisible(pair: PairMaker) -> None:
    drafter = load(pair("qwen3"))
    kv = pool(drafter)
    inject(drafter, kv, TABLES[0], random_aux(9))
    before, _ = block(drafter, kv, TABLES[:1], [5], [9])
    for layer in kv:
        seen = layer.k.clone(), layer.v.clone()
        layer.k.fill_(1e3)
        layer.v.fill_(1e3)
        for position in range(9):
            page, offset = int(TABLES[0][position // PAGE]), position % PAGE
            layer.k[page, offset] = seen[0][page, offset]
            layer.v[page, offset] = seen[1][page, offset]
    after, _ = block(drafter, kv, TABLES[:1], [5], [9])
    assert torch.equal(after, before)


def test_the_last_context_token_is_visible(pair: PairMaker) -> None:
    drafter = load(pair("qwen3"))
    kv = pool(drafter)
    inject(drafter, kv, TABLES[0], random_aux(9))
    nine, _ = block(drafter, kv, TABLES[:1], [5], [9])
    page, offset = int(TABLES[0][8 // PAGE]), 8 % PAGE
    kv[0].v[page, offset] += 1
    changed, _ = block(drafter, kv, TABLES[:1], [5], [9])
    assert not torch.allclose(changed, nine, atol=1e-3)


def test_the_block_leaves_no_trace_in_the_pool(pair: PairMaker) -> None:
    drafter = load(pair("qwen3"))
    kv = pool(drafter)
    inject(drafter, kv, TABLES[0], random_aux(9))
    before = [(layer.k.clone(), layer.v.clone()) for layer in kv]
    block(drafter, kv, TABLES, [5, 6], [9, 0])
    for layer, (k, v) in zip(kv, before, strict=True):
        assert torch.equal(layer.k, k)
        assert torch.equal(layer.v, v)


def test_a_block_may_end_past_the_longest_context(pair: PairMaker) -> None:
    directories = pair("qwen3")
    target = load_target_rank(directories[0], num_positions=16)
    drafter = load_drafter_rank(directories[1], target, num_positions=16)
    kv, aux = pool(drafter), random_aux(16)
    inject(drafter, kv, TABLES[0], aux)
    hidden, _ = block(drafter, kv, TABLES[:1], [5], [16])
    expected = oracle_hidden(load_target(directories[0]), load_drafter(directories[1]), 5, aux)
    assert_near(hidden[0], expected)


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_every_tensor_parallel_size_drafts_the_same(
    pair: PairMaker, size: int, attention_bias: bool
) -> None:
    directories = pair(
        "llama-tied",
        num_heads=9,
        num_kv_heads=3,
        hidden_size=45,
        intermediate_size=65,
        vocab_size=301,
        drafter_options={"attention_bias": attention_bias},
    )
    target, oracle = load_target(directories[0]), load_drafter(directories[1])
    aux = random_aux(9, features=3 * 45)

    def work(tp: TensorParallel) -> tuple[Tensor, Tensor, torch.Size]:
        drafter = load(directories, tp)
        kv = pool(drafter)
        inject(drafter, kv, TABLES[0], aux)
        assert drafter.fused_kv_weight is not None
        return *block(drafter, kv, TABLES[:1], [5], [9]), drafter.fused_kv_weight.shape

    expected = oracle_hidden(target, oracle, 5, aux)
    local_heads = -(-3 // size)
    for hidden, drafts, fused_shape in run_ranks(size, work):
        assert fused_shape == (2 * 2 * local_heads * 16, 45)
        assert_near(hidden[0], expected)
        assert drafts[0].tolist() == propose(target, oracle, 5, aux)


# ----------------------------------------------------------------------- checkpoints of all kinds


def copy_drafter(
    source: Path, directory: Path, extra: dict[str, Tensor] | None = None, **overrides: Any
) -> Path:
    directory.mkdir(exist_ok=True)
    raw = json.loads((source / "config.json").read_text()) | overrides
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = load_file(source / "model.safetensors") | (extra or {})
    save_file(tensors, directory / "model.safetensors")
    return directory


def speculators_drafter(
    pair: Pair, directory: Path, *, draft_ids: list[int] | None, **tensors: Tensor
) -> Path:
    """The pair's drafter in the other format; `draft_ids` are the ids its own head scores."""
    raw = json.loads((pair[1] / "config.json").read_text())
    dflash = raw.pop("dflash_config")
    vocab_size, hidden_size = raw["vocab_size"], raw["hidden_size"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": raw,
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "block_size": raw["block_size"],
        "draft_vocab_size": len(draft_ids) if draft_ids else vocab_size,
    }
    weights = load_file(pair[1] / "model.safetensors")
    if draft_ids:
        ids = torch.tensor(draft_ids)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        weights |= {
            "d2t": ids - torch.arange(len(ids)),
            "t2d": t2d,
            "embed_tokens.weight": target_tensor(pair, "model.embed_tokens.weight"),
            "lm_head.weight": random_aux(len(ids), seed=7, features=hidden_size),
        }
    save_file(weights | tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def target_tensor(pair: Pair, name: str) -> Tensor:
    return load_file(pair[0] / "model.safetensors")[name]


@pytest.mark.parametrize(
    ("name", "source"),
    [("lm_head.weight", "lm_head.weight"), ("embed_tokens.weight", "model.embed_tokens.weight")],
)
def test_a_head_or_embedding_must_be_the_targets(
    pair: PairMaker, tmp_path: Path, name: str, source: str
) -> None:
    directories = pair("qwen3")
    copy = target_tensor(directories, source)
    same = speculators_drafter(directories, tmp_path, draft_ids=None, **{name: copy})
    load((directories[0], same))
    copy[-1, -1] += 1
    other = speculators_drafter(directories, tmp_path, draft_ids=None, **{name: copy})
    with pytest.raises(CheckpointRefused, match=f"{name} differs"):
        load((directories[0], other))


def drafts_after_inject(drafter: DFlashDrafter, aux: Tensor) -> tuple[Tensor, list[int]]:
    kv = pool(drafter)
    inject(drafter, kv, TABLES[0], aux)
    hidden, drafts = block(drafter, kv, TABLES[:1], [5], [len(aux)])
    return hidden[0], drafts[0].tolist()


def test_a_speculators_checkpoint_drafts_as_the_zlab_one(pair: PairMaker, tmp_path: Path) -> None:
    directories = pair("qwen3")
    other = directories[0], speculators_drafter(directories, tmp_path, draft_ids=None)
    aux = random_aux(9)
    hidden, drafts = drafts_after_inject(load(directories), aux)
    other_hidden, other_drafts = drafts_after_inject(load(other), aux)
    assert torch.equal(other_hidden, hidden)
    assert other_drafts == drafts


DRAFT_IDS = sorted({3 * i + i * i % 3 for i in range(97)})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_reduced_vocabulary_is_mapped_to_the_targets(
    pair: PairMaker, tmp_path: Path, size: int
) -> None:
    directories = pair("qwen3")
    reduced = directories[0], speculators_drafter(directories, tmp_path, draft_ids=DRAFT_IDS)
    aux = random_aux(9)
    oracle = load_drafter(directories[1])
    hidden = oracle_hidden(load_target(directories[0]), oracle, 5, aux)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    best = [max(range(len(row)), key=row.__getitem__) for row in (hidden[1:] @ head.t()).tolist()]
    expected = [DRAFT_IDS[i] for i in best]
    assert expected != best
    for _, drafts in run_ranks(size, lambda tp: drafts_after_inject(load(reduced, tp), aux)):
        assert drafts == expected


@pytest.mark.parametrize(
    "d2t",
    [
        torch.full((len(DRAFT_IDS),), 300 - len(DRAFT_IDS) + 1),
        torch.full((len(DRAFT_IDS),), -1),
        torch.zeros(len(DRAFT_IDS) - 1, dtype=torch.int64),
        torch.zeros(len(DRAFT_IDS) + 1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    ],
    ids=["past-the-end", "below-zero", "too-short", "too-long", "single"],
)
def test_a_map_that_leads_outside_the_vocabulary_is_refused(
    pair: PairMaker, tmp_path: Path, d2t: Tensor
) -> None:
    directories = pair("qwen3")
    reduced = (
        directories[0],
        speculators_drafter(directories, tmp_path, draft_ids=DRAFT_IDS, d2t=d2t),
    )
    with pytest.raises(CheckpointRefused, match="d2t"):
        load(reduced)


def test_a_reduced_vocabulary_without_its_map_is_refused(pair: PairMaker, tmp_path: Path) -> None:
    directories = pair("qwen3")
    speculators_drafter(directories, tmp_path, draft_ids=DRAFT_IDS)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["d2t"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointRefused, match="d2t is missing"):
        load((directories[0], tmp_path))


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj.bias", "selector.weight", "layers.2.mlp.up_proj.weight"]
)
def test_a_tensor_that_is_no_part_of_dflash_is_refused(
    pair: PairMaker, tmp_path: Path, name: str
) -> None:
    target, drafter = pair("qwen3")
    copy_drafter(drafter, tmp_path, {name: torch.ones(64)})
    with pytest.raises(CheckpointRefused, match=name):
        load((target, tmp_path))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_refused(pair: PairMaker, tmp_path: Path, name: str) -> None:
    target, drafter = pair("qwen3")
    copy_drafter(drafter, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointRefused, match=f"{name} is missing"):
        load((target, tmp_path))


@pytest.mark.parametrize("shape", [(32,), (1, 32)])
def test_a_mask_embedding_replaces_the_mask_tokens_row(
    pair: PairMaker, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    target, source = pair("qwen3")
    aux = random_aux(9)
    plain, _ = drafts_after_inject(load((target, source)), aux)
    copy_drafter(source, tmp_path)
    torch.save(random_aux(1, seed=3, features=32).reshape(shape), tmp_path / "mask_embedding.pt")
    own, drafts = drafts_after_inject(load((target, tmp_path)), aux)
    assert not torch.allclose(own, plain, atol=1e-2)
    oracle = load_drafter(tmp_path)
    assert_near(own, oracle_hidden(load_target(target), oracle, 5, aux))
    assert drafts == propose(load_target(target), oracle, 5, aux)


@pytest.mark.parametrize("content", [torch.zeros(31), {"mask": torch.zeros(32)}, [0.0] * 32])
def test_a_mask_embedding_of_another_form_is_refused(
    pair: PairMaker, tmp_path: Path, content: object
) -> None:
    target, source = pair("qwen3")
    copy_drafter(source, tmp_path)
    torch.save(content, tmp_path / "mask_embedding.pt")
    with pytest.raises(CheckpointRefused, match=r"mask_embedding\.pt"):
        load((target, tmp_path))


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_mask_embedding_never_runs_code(pair: PairMaker, tmp_path: Path) -> None:
    target, source = pair("qwen3")
    copy_drafter(source, tmp_path)
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "mask_embedding.pt")
    with pytest.raises((CheckpointRefused, pickle.UnpicklingError)):
        load((target, tmp_path))
    assert not (tmp_path / "sprung").exists()
