"""DFlash speculative decoding, written out as slowly and plainly as possible.

This is a test oracle. It keeps no KV cache and serves one request: every step reruns the target
over the whole sequence and recomputes the drafter's context from the target's hidden states, so
there is no state that could go stale. The drafter's layers are assembled from the parts of
transformers' Qwen3.

Shapes use these letters:

    V  vocabulary          H  hidden size          D  head size
    S  tokens fed to the target in one run         C  context tokens seen by the drafter
    B  drafter block size                          K  drafts per step, B - 1
    F  captured target layers                      T  target layers
"""

import json
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


# ------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Step:
    """One verify step: the drafts it verified and the tokens it emitted.

    `drafts` holds the K drafts, or nothing when decoding without a drafter. `emitted` holds
    `x_0..x_a`, the accepted drafts and the bonus token, cut where the request ended.
    """

    drafts: list[int]
    emitted: list[int]


@dataclass(frozen=True)
class Trace:
    """A finished request.

    `token_ids` are all generated tokens: the first comes from the prefill, the others from
    `steps`, so `token_ids[1:]` is the concatenation of every `emitted`.
    """

    token_ids: list[int]
    steps: list[Step]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verify step, bonus included; NaN without a verify step."""
        if not self.steps:
            return math.nan
        return sum(len(step.emitted) for step in self.steps) / len(self.steps)


# ------------------------------------------------------------------------- drafter checkpoint


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's `config.json` says: its layers, and how it plugs into its target."""

    layers: Qwen3Config
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int


def parse_drafter_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Read a z-lab `config.json`, refusing what this oracle does not compute.

    `target_layer_ids`, `mask_token_id` and `block_size` may sit in `dflash_config` or at the top
    level. Rotary parameters may be given as `rope_parameters` or as `rope_scaling` beside
    `rope_theta`; transformers makes one of the two.

    Raises ValueError for a missing field or an unsupported variant.
    """
    nested = raw.get("dflash_config") or {}

    def required(name: str) -> Any:
        for source in (nested, raw):
            if source.get(name) is not None:
                return source[name]
        raise ValueError(f"the drafter's config.json has no {name}")

    for flag in ("causal", "use_swa"):
        if nested.get(flag) or raw.get(flag):
            raise ValueError(f"unsupported: {flag} = true")

    # transformers writes defaults into the rotary dictionaries it is given, hence the copy.
    layers = Qwen3Config(**json.loads(json.dumps(dict(raw))))
    if set(layers.layer_types or ()) != {"full_attention"}:
        raise ValueError(f"unsupported: layer_types = {layers.layer_types}")
    rope_type = (layers.rope_parameters or {}).get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"unsupported: rope_type = {rope_type}")

    target_layer_ids = tuple(required("target_layer_ids"))
    if list(target_layer_ids) != sorted(set(target_layer_ids)):
        raise ValueError(f"target_layer_ids must ascend, got {list(target_layer_ids)}")
    return DrafterConfig(
        layers=layers,
        block_size=required("block_size"),
        mask_token_id=required("mask_token_id"),
        target_layer_ids=target_layer_ids,
        num_target_layers=required("num_target_layers"),
    )


def load_drafter(directory: str | Path, dtype: torch.dtype = torch.float32) -> "ReferenceDrafter":
    """Load a z-lab checkpoint: `config.json`, `model.safetensors`, maybe `mask_embedding.pt`.

    `mask_embedding.pt` holds a tensor `[H]` or `[1, H]` that replaces the target's embedding of
    the mask token. Raises ValueError for a config this oracle does not compute and RuntimeError
    when the tensors are not exactly those the config asks for.
    """
    directory = Path(directory)
    config = parse_drafter_config(json.loads((directory / "config.json").read_text()))
    drafter = ReferenceDrafter(config)
    drafter.load_state_dict(load_file(directory / "model.safetensors"))
    mask_path = directory / "mask_embedding.pt"
    if mask_path.exists():
        mask_embedding = torch.load(mask_path, map_location="cpu", weights_only=True)
        drafter.mask_embedding = mask_embedding.reshape(config.layers.hidden_size).to(dtype)
    # Parameters only: a rounded inverse rotary frequency would misplace distant tokens.
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    return drafter.eval()


# ------------------------------------------------------------------------------ drafter model


class ReferenceAttention(nn.Module):
    """Qwen3 attention of a block over an injected context and over itself, in both directions."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, self.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from the block to context and block.

        block `[B, H]`, already normed; context `[C, H]`, used as it is; cos and sin `[C + B, D]`
        for positions `0..C+B-1`, of which the block has the last B. Returns `[B, H]`.
        """
        num_context, num_block = len(context), len(block)
        visible = torch.cat([context, block])  # [C + B, H]
        q = self.q_norm(self.q_proj(block).view(num_block, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(visible).view(len(visible), self.num_kv_heads, self.head_dim))
        v = self.v_proj(visible).view(len(visible), self.num_kv_heads, self.head_dim)

        q = rotate(q.transpose(0, 1), cos[num_context:], sin[num_context:])  # [heads, B, D]
        k = rotate(k.transpose(0, 1), cos, sin)  # [kv_heads, C + B, D]
        v = v.transpose(0, 1)

        group = self.num_heads // self.num_kv_heads
        k = k.repeat_interleave(group, dim=0)  # [heads, C + B, D]
        v = v.repeat_interleave(group, dim=0)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.head_dim)  # [heads, B, C + B]
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        mixed = (weights @ v).transpose(0, 1).reshape(num_block, self.num_heads * self.head_dim)
        attended: Tensor = self.o_proj(mixed)
        return attended


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[heads, S, D]` for the positions of cos and sin `[S, D]`."""
    rotated: Tensor = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=0)[0]
    return rotated


class ReferenceLayer(nn.Module):
    """A pre-norm Qwen3 layer; the injected context enters its attention only."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = ReferenceAttention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, block: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map block `[B, H]` to `[B, H]`; context `[C, H]`; cos and sin `[C + B, D]`."""
        block = block + self.self_attn(self.input_layernorm(block), context, cos, sin)
        mlp_output: Tensor = self.mlp(self.post_attention_layernorm(block))
        return block + mlp_output


class ReferenceDrafter(nn.Module):
    """The drafter: parameters named as in a z-lab checkpoint, embedding and head the target's."""

    mask_embedding: Tensor | None  # [H]

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        layers = config.layers
        self.config = config
        self.mask_embedding = None
        self.fc = nn.Linear(
            len(config.target_layer_ids) * layers.hidden_size, layers.hidden_size, bias=False
        )
        self.hidden_norm = Qwen3RMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        self.layers = nn.ModuleList(ReferenceLayer(layers) for _ in range(layers.num_hidden_layers))
        self.norm = Qwen3RMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.fc.weight.dtype

    def forward(self, block: Tensor, aux: Tensor) -> Tensor:
        """Run the block over the context.

        block `[B, H]`, the embedded `[bonus, mask x K]` at positions `C..C+B-1`; aux `[C, F * H]`,
        the target's captured states at positions `0..C-1`. Returns final states `[B, H]`.
        """
        context = self.hidden_norm(self.fc(aux))  # [C, H]
        positions = torch.arange(len(context) + len(block)).unsqueeze(0)
        cos, sin = self.rotary(block, positions)  # [1, C + B, D] each
        for layer in self.layers:
            block = layer(block, context, cos[0], sin[0])
        final: Tensor = self.norm(block)
        return final


# ----------------------------------------------------------------------------- pure functions


def lowest_argmax(logits: Tensor) -> list[int]:
    """The best token of each row of logits `[S, V]`, ties to the lowest id."""
    is_best = logits == logits.max(dim=-1, keepdim=True).values
    return [int(row.nonzero()[0]) for row in is_best]


def accept(drafts: Sequence[int], predictions: Sequence[int]) -> list[int]:
    """The tokens `x_0..x_a` one verify step emits.

    `predictions[i]` is the target's token after the bonus and `drafts[:i]`, so there is one more
    of them than drafts. Every draft that equals the prediction at its position is accepted, up
    to the first that does not; the prediction there is the new bonus.
    """
    assert len(predictions) == len(drafts) + 1
    emitted = [predictions[0]]
    for draft, prediction in zip(drafts, predictions[1:], strict=True):
        if draft != emitted[-1]:
            break
        emitted.append(prediction)
    return emitted


def cut(emitted: Sequence[int], budget: int, stop_token_ids: Collection[int]) -> list[int]:
    """The part of `emitted` that a request with `budget` tokens left keeps, stop id included."""
    kept: list[int] = []
    for token_id in emitted[:budget]:
        kept.append(token_id)
        if token_id in stop_token_ids:
            break
    return kept


def captured_states(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Concatenate the outputs of the target layers `layer_ids`, in the order given.

    hidden_states is transformers' tuple of T + 1 tensors `[1, S, H]`: the embeddings, then the
    output of each layer. Returns `[S, F * H]`.
    """
    num_layers = len(hidden_states) - 1
    # The tuple's last entry is not a layer's output: it has been through the final norm.
    assert all(0 < layer_id + 1 <= num_layers - 1 for layer_id in layer_ids)
    return torch.cat([hidden_states[layer_id + 1][0] for layer_id in layer_ids], dim=-1)


# ------------------------------------------------------------------------------------ decoding


def check_pair(target: PreTrainedModel, drafter: ReferenceDrafter) -> None:
    """Raise ValueError when the drafter was made for another target."""
    wanted, found = drafter.config, target.config
    for name, drafter_value, target_value in (
        ("hidden_size", wanted.layers.hidden_size, found.hidden_size),
        ("vocab_size", wanted.layers.vocab_size, found.vocab_size),
        ("num_target_layers", wanted.num_target_layers, found.num_hidden_layers),
    ):
        if drafter_value != target_value:
            raise ValueError(f"{name}: the drafter has {drafter_value}, the target {target_value}")
    last_id = found.num_hidden_layers - 2
    if not all(0 <= layer_id <= last_id for layer_id in wanted.target_layer_ids):
        raise ValueError(f"target_layer_ids {wanted.target_layer_ids} are not within 0..{last_id}")


@torch.no_grad()
def run_target(target: PreTrainedModel, token_ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Run the target over `token_ids` (S of them, from position 0) without a cache.

    Returns logits `[S, V]` and transformers' hidden states, T + 1 tensors `[1, S, H]`.
    """
    assert not target.training
    output = target(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    return output.logits[0], list(output.hidden_states)


def embed_block(target: PreTrainedModel, drafter: ReferenceDrafter, bonus_id: int) -> Tensor:
    """Embed `[bonus, mask x K]` with the target's table, or the drafter's own mask embedding.

    Returns `[B, H]` in the drafter's dtype.
    """
    config = drafter.config
    embedding = target.get_input_embeddings()
    rows = []
    for token_id in [bonus_id] + [config.mask_token_id] * (config.block_size - 1):
        if token_id == config.mask_token_id and drafter.mask_embedding is not None:
            rows.append(drafter.mask_embedding)
        else:
            rows.append(embedding(torch.tensor(token_id)).to(drafter.dtype))
    return torch.stack(rows)


def draft_logits(
    target: PreTrainedModel, drafter: ReferenceDrafter, bonus_id: int, aux: Tensor
) -> Tensor:
    """The target's head over the drafter's mask slots.

    `bonus_id` is the token at position C, not yet fed to the target; aux `[C, F * H]` are the
    captured states of positions `0..C-1`. Returns `[K, V]`: row j scores position `C + 1 + j`.
    """
    block = embed_block(target, drafter, bonus_id)
    final = drafter(block, aux.to(drafter.dtype))  # [B, H]
    logits: Tensor = target.get_output_embeddings()(final[1:].to(target.dtype))
    return logits


@torch.no_grad()
def propose(
    target: PreTrainedModel, drafter: ReferenceDrafter, bonus_id: int, aux: Tensor
) -> list[int]:
    """The K drafts after the bonus token; arguments as in `draft_logits`."""
    return lowest_argmax(draft_logits(target, drafter, bonus_id, aux))


@torch.no_grad()
def generate(
    target: PreTrainedModel,
    drafter: ReferenceDrafter | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> Trace:
    """Decode one request greedily and record what every verify step did.

    Ends after `max_new_tokens` tokens or at the first stop id, which is kept. Every step verifies
    a full block, also when fewer tokens are left to emit. Without a drafter each step verifies no
    drafts and emits one token.

    Raises ValueError for an empty prompt, a budget below one token or a drafter made for another
    target.
    """
    if not prompt_ids or max_new_tokens < 1:
        raise ValueError("generate needs at least one prompt token and one new token")
    layer_ids: tuple[int, ...] = ()
    if drafter is not None:
        check_pair(target, drafter)
        layer_ids = drafter.config.target_layer_ids

    # Prefill: the whole prompt is context, and its last row gives the first bonus token.
    logits, hidden_states = run_target(target, prompt_ids)
    surviving_states = hidden_states
    new_ids = lowest_argmax(logits[-1:])
    steps: list[Step] = []

    while len(new_ids) < max_new_tokens and new_ids[-1] not in stop_token_ids:
        # Inject and propose. The states are those of every token fed so far and not rejected,
        # that is, of all but the bonus token.
        num_fed = len(prompt_ids) + len(new_ids) - 1
        assert surviving_states[0].shape[1] == num_fed
        drafts: list[int] = []
        if drafter is not None:
            aux = captured_states(surviving_states, layer_ids)  # [num_fed, F * H]
            drafts = propose(target, drafter, new_ids[-1], aux)

        # Verify: rows from num_fed on are those of the bonus token and of the drafts.
        logits, hidden_states = run_target(target, [*prompt_ids, *new_ids, *drafts])

        # Accept.
        emitted = accept(drafts, lowest_argmax(logits[num_fed:]))
        num_surviving = num_fed + len(emitted)
        surviving_states = [states[:, :num_surviving] for states in hidden_states]

        kept = cut(emitted, max_new_tokens - len(new_ids), stop_token_ids)
        steps.append(Step(drafts, kept))
        new_ids.extend(kept)
    return Trace(new_ids, steps)


# --------------------------------------------------------------------------- drafters for tests


def make_random_drafter(
    directory: str | Path,
    *,
    target_config: PretrainedConfig,
    num_layers: int,
    block_size: int,
    target_layer_ids: Sequence[int],
    mask_token_id: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int,
    intermediate_size: int | None = None,
    rope_parameters: Mapping[str, Any] | None = None,
    attention_bias: bool = False,
    with_mask_embedding: bool = False,
    dtype: torch.dtype = torch.float32,
    config_overrides: Mapping[str, Any] | None = None,
) -> None:
    """Write a random z-lab checkpoint that fits a target.

    Matrices keep the scale of what they multiply, and every norm has weights of its own, so that
    no two layers, heads or slots compute the same thing. `intermediate_size` is the target's
    unless given. `rope_parameters` is written as it is; without it the config has a top-level
    `rope_theta` of 10000 and a null `rope_scaling`. `config_overrides` replaces top-level fields
    last, for configs in another style.
    """
    hidden = target_config.hidden_size
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": attention_bias,
        "attention_dropout": 0.0,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(target_layer_ids),
        },
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size or target_config.intermediate_size,
        "layer_types": ["full_attention"] * num_layers,
        "max_position_embeddings": target_config.max_position_embeddings,
        "max_window_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "num_target_layers": target_config.num_hidden_layers,
        "rms_norm_eps": target_config.rms_norm_eps,
        "sliding_window": None,
        "tie_word_embeddings": target_config.tie_word_embeddings,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target_config.vocab_size,
    }
    if rope_parameters is None:
        raw |= {"rope_theta": 10000.0, "rope_scaling": None}
    else:
        raw |= {"rope_parameters": dict(rope_parameters)}
    raw |= config_overrides or {}

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in ReferenceDrafter(parse_drafter_config(raw)).state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 2:
            weights[name] = noise / math.sqrt(tensor.shape[1])
        elif name.endswith("bias"):
            weights[name] = 0.3 * noise
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            # Larger than one: a sharp attention tells the mask slots apart, which differ in
            # nothing but their position.
            weights[name] = 1.5 + 0.2 * noise
        else:
            weights[name] = 1.0 + 0.2 * noise

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(
        {name: weight.to(dtype) for name, weight in weights.items()},
        directory / "model.safetensors",
    )
    if with_mask_embedding:
        mask_embedding = target_config.initializer_range * torch.randn(hidden, generator=generator)
        torch.save(mask_embedding.to(dtype), directory / "mask_embedding.pt")


def train_drafter(
    directory: str | Path,
    target: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    num_steps: int,
    seed: int,
    blocks_per_step: int = 4,
    learning_rate: float = 3e-3,
) -> float:
    """Teach the drafter in `directory` a few sequences by heart, and save it there.

    `sequences` are token ids of a prompt and the target's own continuation. Every step takes
    `blocks_per_step` random (sequence, bonus position) pairs and fits the block's drafts to the
    tokens that follow. A short run gives the partial acceptance that tests want. Returns the last
    step's mean cross-entropy.
    """
    directory = Path(directory)
    drafter = load_drafter(directory)
    check_pair(target, drafter)
    parameters = dict(drafter.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters.values(), lr=learning_rate)
    layer_ids = drafter.config.target_layer_ids
    num_drafts = drafter.config.block_size - 1
    corpus = [
        (list(token_ids), captured_states(run_target(target, token_ids)[1], layer_ids))
        for token_ids in sequences
    ]

    choose = random.Random(seed)
    loss = torch.tensor(math.nan)
    for _ in range(num_steps):
        losses = []
        for _ in range(blocks_per_step):
            token_ids, aux = choose.choice(corpus)
            bonus = choose.randrange(1, len(token_ids) - 1)
            expected = torch.tensor(token_ids[bonus + 1 : bonus + 1 + num_drafts])
            logits = draft_logits(target, drafter, token_ids[bonus], aux[:bonus])
            losses.append(functional.cross_entropy(logits[: len(expected)].float(), expected))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        # Not loss.backward(): that would leave gradients on the target's embedding and head.
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    dtypes = {name: w.dtype for name, w in load_file(directory / "model.safetensors").items()}
    save_file(
        {name: p.detach().to(dtypes[name]) for name, p in parameters.items()},
        directory / "model.safetensors",
    )
    return loss.item()
