"""The oracle against transformers, formulas and element-wise loops, on tiny random models."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from . import dflash_reference as dflash
from .dflash_reference import Step, Trace, generate, load_drafter, make_random_drafter

VOCAB, HIDDEN, NUM_LAYERS = 48, 32, 6
BLOCK_SIZE, MASK, LAYER_IDS = 5, 7, (0, 2, 4)
PROMPT = [3, 14, 15, 9, 26, 5]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_target(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random target whose greedy text is not a short loop."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=family == "qwen3",
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return model_class(config).eval()


def write_drafter(directory: Path, target: PreTrainedModel, **options: object) -> None:
    """Write a random drafter with the sizes of this module, `options` replacing any of them."""
    sizes = {
        "target_config": target.config,
        "num_layers": 2,
        "block_size": BLOCK_SIZE,
        "target_layer_ids": LAYER_IDS,
        "mask_token_id": MASK,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "seed": 1,
    }
    make_random_drafter(directory, **(sizes | options))


def random_aux(num_context: int, seed: int = 2) -> Tensor:
    """Captured states `[C, F * H]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_context, len(LAYER_IDS) * HIDDEN, generator=generator)


def greedy(target: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Transformers' own greedy continuation."""
    output = target.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids)),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    return output[0, len(prompt_ids) :].tolist()


# ------------------------------------------------------------------------------- whole requests


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_speculative_equals_transformers_greedy(
    tmp_path: Path, family: str, attention_bias: bool
) -> None:
    target = make_target(family)
    write_drafter(tmp_path, target, attention_bias=attention_bias)
    expected = greedy(target, PROMPT, 40)
    assert len(set(expected)) > 10
    untrained = generate(target, load_drafter(tmp_path), PROMPT, 40)
    dflash.train_drafter(tmp_path, target, [PROMPT + expected], num_steps=30, seed=0)
    trained = generate(target, load_drafter(tmp_path), PROMPT, 40)

    assert untrained.token_ids == trained.token_ids == expected
    assert untrained.mean_acceptance_length < trained.mean_acceptance_length
    assert len({len(step.emitted) for step in trained.steps}) > 2

    # Every step emits the drafts that match what follows, and one more.
    future = expected[1:]
    for step in trained.steps:
        matches = [draft == token for draft, token in zip(step.drafts, future, strict=False)]
        num_accepted = [*matches, False].index(False)
        assert len(step.drafts) == BLOCK_SIZE - 1
        assert step.emitted == future[: num_accepted + 1]
        future = future[len(step.emitted) :]
    assert future == []


def test_without_drafter_every_step_emits_one_token() -> None:
    target = make_target()
    trace = generate(target, None, PROMPT, 10)
    assert trace.token_ids == greedy(target, PROMPT, 10)
    assert trace.steps == [Step([], [token_id]) for token_id in trace.token_ids[1:]]
    assert trace.mean_acceptance_length == 1.0


def test_a_drafter_that_knows_the_future_is_accepted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    write_drafter(tmp_path, target)
    expected = greedy(target, PROMPT, 40)

    def foresee(_target: object, _drafter: object, bonus_id: int, aux: Tensor) -> list[int]:
        position = len(aux) - len(PROMPT)
        assert bonus_id == expected[position]
        return expected[position + 1 : position + BLOCK_SIZE]

    monkeypatch.setattr(dflash, "propose", foresee)
    trace = generate(target, load_drafter(tmp_path), PROMPT, 1 + 3 * BLOCK_SIZE)
    assert trace.token_ids == expected[: 1 + 3 * BLOCK_SIZE]
    assert trace.mean_acceptance_length == BLOCK_SIZE

    stop = expected[BLOCK_SIZE + 2]
    assert stop not in expected[: BLOCK_SIZE + 2]
    stopped = generate(target, load_drafter(tmp_path), PROMPT, 30, stop_token_ids={stop})
    assert stopped.token_ids == expected[: BLOCK_SIZE + 3]
    assert [len(step.emitted) for step in stopped.steps] == [BLOCK_SIZE, 2]
    assert stopped.mean_acceptance_length == (BLOCK_SIZE + 2) / 2

    for budget in (2, BLOCK_SIZE + 1, BLOCK_SIZE + 3):
        assert (
            generate(target, load_drafter(tmp_path), PROMPT, budget).token_ids
            == (expected[:budget])
        )


def test_a_request_that_ends_in_its_prefill_has_no_step(tmp_path: Path) -> None:
    target = make_target()
    write_drafter(tmp_path, target)
    first = greedy(target, PROMPT, 1)
    for trace in (
        generate(target, load_drafter(tmp_path), PROMPT, 1),
        generate(target, load_drafter(tmp_path), PROMPT, 9, stop_token_ids=first),
    ):
        assert trace == Trace(first, [])
        assert math.isnan(trace.mean_acceptance_length)


# ----------------------------------------------------------------------------- stages of a step


def test_lowest_argmax_breaks_ties_downwards() -> None:
    assert dflash.lowest_argmax(torch.tensor([[0.0, 2, 1, 2], [5, 5, 5, 5], [0, 0, 0, 1]])) == [
        1,
        0,
        3,
    ]


@pytest.mark.parametrize(
    ("drafts", "predictions", "emitted"),
    [
        ([], [4], [4]),
        ([4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]),
        ([4, 5, 6], [4, 9, 6, 7], [4, 9]),
        ([4, 5, 6], [9, 5, 6, 7], [9]),
    ],
)
def test_accept(drafts: list[int], predictions: list[int], emitted: list[int]) -> None:
    assert dflash.accept(drafts, predictions) == emitted


def test_captured_states_are_the_outputs_of_the_named_layers() -> None:
    target = make_target()
    outputs: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    for i, layer in enumerate(target.model.layers):
        layer.register_forward_hook(lambda _m, _a, output, i=i: outputs.update({i: output[0]}))
        layer.register_forward_pre_hook(lambda _m, args, i=i: inputs.update({i: args[0][0]}))
    aux = dflash.captured_states(dflash.run_target(target, PROMPT)[1], LAYER_IDS)
    assert torch.equal(aux, torch.cat([outputs[i] for i in LAYER_IDS], dim=-1))
    assert torch.equal(aux, torch.cat([inputs[i + 1] for i in LAYER_IDS], dim=-1))


@pytest.mark.parametrize("layer_id", [-1, NUM_LAYERS - 1])
def test_captured_states_stay_before_the_final_norm(layer_id: int) -> None:
    with pytest.raises(AssertionError):
        dflash.captured_states([torch.zeros(1, 1, HIDDEN)] * (NUM_LAYERS + 1), [layer_id])


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("rope", [{"rope_theta": 500.0}, YARN])
def test_drafter_equals_transformers_layers_on_a_filled_cache(
    tmp_path: Path, attention_bias: bool, rope: dict[str, object]
) -> None:
    write_drafter(tmp_path, make_target(), attention_bias=attention_bias, rope_parameters=rope)
    drafter = load_drafter(tmp_path)
    config = drafter.config.layers
    config._attn_implementation = "eager"
    num_context = 11
    aux, block = random_aux(num_context), torch.randn(BLOCK_SIZE, HIDDEN)

    context = drafter.hidden_norm(drafter.fc(aux))
    positions = torch.arange(num_context + BLOCK_SIZE)
    cos, sin = drafter.rotary(context, positions[None])
    cache = DynamicCache(config=config)
    hidden = block[None]
    for i, layer in enumerate(drafter.layers):
        theirs = Qwen3DecoderLayer(config, i).eval()
        theirs.load_state_dict(layer.state_dict())
        attention = theirs.self_attn
        heads = (1, num_context, config.num_key_value_heads, config.head_dim)
        keys = attention.k_norm(attention.k_proj(context).view(heads)).transpose(1, 2)
        keys = dflash.rotate(keys[0], cos[0, :num_context], sin[0, :num_context])[None]
        cache.update(keys, attention.v_proj(context).view(heads).transpose(1, 2), i)
        hidden = theirs(
            hidden,
            attention_mask=None,
            cache=cache,
            position_embeddings=(cos[:, num_context:], sin[:, num_context:]),
        )
    torch.testing.assert_close(drafter(block, aux), drafter.norm(hidden[0]))


def test_attention_equals_element_wise_loops(tmp_path: Path) -> None:
    write_drafter(tmp_path, make_target())
    attention = load_drafter(tmp_path).layers[0].self_attn
    block, context = torch.randn(3, HIDDEN), torch.randn(4, HIDDEN)
    angles = torch.rand(7, 8)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def head(row: Tensor, projection: torch.nn.Linear, index: int) -> Tensor:
        return projection(row)[index * 16 : (index + 1) * 16]

    def turned(vector: Tensor, norm: torch.nn.Module, position: int) -> list[float]:
        low, high = norm(vector).split(8)
        angle = angles[position]
        return [
            *(low * angle.cos() - high * angle.sin()).tolist(),
            *(high * angle.cos() + low * angle.sin()).tolist(),
        ]

    rows = [*context, *block]
    mixed = torch.zeros(3, 6 * 16)
    for i in range(3):
        for h in range(6):
            q = turned(head(block[i], attention.q_proj, h), attention.q_norm, 4 + i)
            exps = []
            for position, row in enumerate(rows):
                k = turned(head(row, attention.k_proj, h // 3), attention.k_norm, position)
                exps.append(math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / 4))
            for weight, row in zip(exps, rows, strict=True):
                value = head(row, attention.v_proj, h // 3)
                mixed[i, h * 16 : (h + 1) * 16] += weight / sum(exps) * value
    torch.testing.assert_close(attention(block, context, cos, sin), attention.o_proj(mixed))


def test_block_is_bidirectional_and_sees_all_context(tmp_path: Path) -> None:
    write_drafter(tmp_path, make_target())
    drafter = load_drafter(tmp_path)
    aux, block = random_aux(9), torch.randn(BLOCK_SIZE, HIDDEN)
    before = drafter(block, aux)
    for changed_slot in range(BLOCK_SIZE):
        other = block.clone()
        other[changed_slot] += torch.randn(HIDDEN)
        assert ((drafter(other, aux) - before).abs().amax(dim=-1) > 1e-4).all()
    for changed_row in range(len(aux)):
        other = aux.clone()
        other[changed_row] += torch.randn(aux.shape[1])
        assert ((drafter(block, other) - before).abs().amax(dim=-1) > 1e-5).all()


def test_rejected_drafts_leave_no_trace_in_the_next_proposal(tmp_path: Path) -> None:
    target = make_target()
    write_drafter(tmp_path, target)
    drafter = load_drafter(tmp_path)
    for trailing in ([], [1, 2, 3, 4]):
        states = dflash.run_target(target, PROMPT + trailing)[1]
        aux = dflash.captured_states(states, LAYER_IDS)[: len(PROMPT)]
        logits = dflash.draft_logits(target, drafter, 11, aux)
        if not trailing:
            expected = logits
    torch.testing.assert_close(logits, expected)


def test_random_drafts_differ_by_slot_and_context(tmp_path: Path) -> None:
    target = make_target()
    write_drafter(tmp_path, target, block_size=9)
    drafter = load_drafter(tmp_path)
    proposals = [dflash.propose(target, drafter, 11, random_aux(8, seed)) for seed in range(4)]
    assert all(len(drafts) == 8 for drafts in proposals)
    assert len({tuple(drafts) for drafts in proposals}) == 4
    assert any(len(set(drafts)) > 1 for drafts in proposals)


# ----------------------------------------------------------------------------------- checkpoint


def test_same_seed_writes_the_same_checkpoint(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_drafter(tmp_path / name, make_target(), seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def inverse_frequencies(directory: Path, **overrides: object) -> Tensor:
    """The rotary frequencies `[D / 2]` of a drafter with these fields in its config."""
    write_drafter(directory, make_target(), config_overrides=overrides)
    return load_drafter(directory).rotary.inv_freq


def test_theta_is_found_in_either_place(tmp_path: Path) -> None:
    expected = 777.0 ** (-torch.arange(0, 16, 2) / 16)
    for overrides in (
        {"rope_theta": 777.0, "rope_scaling": None},
        {"rope_theta": 777.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 777.0}},
    ):
        torch.testing.assert_close(inverse_frequencies(tmp_path, **overrides), expected)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_rope_divides_every_frequency(tmp_path: Path, key: str) -> None:
    base = inverse_frequencies(tmp_path)
    scaled = inverse_frequencies(tmp_path, rope_scaling={key: "linear", "factor": 4.0})
    torch.testing.assert_close(scaled, base / 4)


def test_llama3_rope_divides_long_wavelengths_only(tmp_path: Path) -> None:
    expected = []
    for frequency in inverse_frequencies(tmp_path).tolist():
        turns = 32 * frequency / (2 * math.pi)
        share = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(share * frequency + (1 - share) * frequency / 8.0)
    scaled = inverse_frequencies(tmp_path, rope_scaling=LLAMA3)
    torch.testing.assert_close(scaled, torch.tensor(expected))


def test_yarn_rope_blends_by_dimension_and_scales_attention(tmp_path: Path) -> None:
    base = inverse_frequencies(tmp_path).tolist()

    def dimension(turns: float) -> float:
        return 16 * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), 15)
    expected = []
    for i, frequency in enumerate(base):
        share = 1 - min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(share * frequency + (1 - share) * frequency / 4.0)
    scaled = inverse_frequencies(tmp_path, rope_scaling=YARN)
    torch.testing.assert_close(scaled, torch.tensor(expected))
    assert load_drafter(tmp_path).rotary.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1)


def test_mask_embedding_replaces_the_mask_tokens_row(tmp_path: Path) -> None:
    target = make_target()
    aux = random_aux(6)
    write_drafter(tmp_path / "plain", target)
    plain = dflash.draft_logits(target, load_drafter(tmp_path / "plain"), 11, aux)
    write_drafter(tmp_path / "own", target, with_mask_embedding=True)
    own = dflash.draft_logits(target, load_drafter(tmp_path / "own"), 11, aux)
    assert not torch.allclose(plain, own)

    row = target.get_input_embeddings().weight[MASK].detach().clone()
    for stored in (row, row[None]):
        torch.save(stored, tmp_path / "own" / "mask_embedding.pt")
        same = dflash.draft_logits(target, load_drafter(tmp_path / "own"), 11, aux)
        assert torch.equal(same, plain)


def test_bfloat16_keeps_exact_rotary_frequencies(tmp_path: Path) -> None:
    target = make_target()
    write_drafter(tmp_path, target, dtype=torch.bfloat16)
    wide, narrow = load_drafter(tmp_path), load_drafter(tmp_path, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow.rotary.inv_freq, wide.rotary.inv_freq)
    aux = random_aux(6)
    logits = dflash.draft_logits(target, narrow, 11, aux)
    expected = dflash.draft_logits(target, wide, 11, aux)
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.99


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 7, "causal": True}},
        {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 7, "use_swa": True}},
        {"dflash_config": {"target_layer_ids": [0, 2]}},
        {"dflash_config": {"mask_token_id": 7}},
        {"dflash_config": {"target_layer_ids": [2, 0], "mask_token_id": 7}},
        {"block_size": None},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, overrides: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unsupported|has no|must ascend"):
        write_drafter(tmp_path, make_target(), config_overrides=overrides)


def test_ids_at_top_level_are_read(tmp_path: Path) -> None:
    fields = {"dflash_config": None, "target_layer_ids": [1, 3], "mask_token_id": 9}
    write_drafter(tmp_path, make_target(), config_overrides=fields)
    config = load_drafter(tmp_path).config
    assert (config.target_layer_ids, config.mask_token_id) == ((1, 3), 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 50),
        ("num_target_layers", 7),
        ("dflash_config", {"target_layer_ids": [0, NUM_LAYERS - 1], "mask_token_id": 7}),
    ],
)
def test_a_drafter_for_another_target_is_refused(tmp_path: Path, field: str, value: object) -> None:
    target = make_target()
    write_drafter(tmp_path, target, config_overrides={field: value})
    with pytest.raises(ValueError, match=r"vocab_size|num_target_layers|target_layer_ids"):
        generate(target, load_drafter(tmp_path), PROMPT, 4)
