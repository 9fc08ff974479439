"""Random tiny checkpoints: a target, its tokenizer, and a drafter that was made for it.

Targets are written by transformers, drafters by the reference oracle, so what the engine loads was
not made by code of its own. Norms and biases are random too: whatever is left out shows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracle.dflash_reference import generate, make_random_drafter, train_drafter

Kind = Literal["llama", "llama-tied", "llama3", "qwen3"]
KINDS: tuple[Kind, ...] = ("llama", "llama-tied", "llama3", "qwen3")

LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_pair(
    directory: Path,
    kind: Kind,
    *,
    block_size: int = 5,
    vocab_size: int = 300,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_layers: int = 5,
    target_layer_ids: Sequence[int] = (0, 2, 3),
    num_draft_layers: int = 2,
    max_position_embeddings: int = 256,
    eos_token_id: int | None = None,
    biases: bool = False,
    seed: int = 0,
    drafter_options: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write `target` and `drafter` under `directory`; returns their paths.

    `drafter_options` replaces arguments of `make_random_drafter`; without any, the drafter has the
    target's head counts and its mask token is the vocabulary's last id.
    """
    target_dir = make_target(
        directory / "target",
        kind,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=eos_token_id,
        biases=biases,
        seed=seed,
    )
    options: dict[str, Any] = {
        "target_config": load_target(target_dir).config,
        "num_layers": num_draft_layers,
        "block_size": block_size,
        "target_layer_ids": target_layer_ids,
        "mask_token_id": vocab_size - 1,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "seed": seed + 1,
    }
    make_random_drafter(directory / "drafter", **(options | dict(drafter_options or {})))
    return target_dir, directory / "drafter"


def make_target(
    directory: Path,
    kind: Kind,
    *,
    vocab_size: int = 300,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_layers: int = 5,
    max_position_embeddings: int = 256,
    eos_token_id: int | None = None,
    biases: bool = False,
    seed: int = 0,
    max_shard_size: str = "1GB",
) -> Path:
    """Write a float32 target and its tokenizer into `directory`, and return it.

    A small `max_shard_size` splits the weights over files with an index. Greedy text of these
    targets is no short loop.
    """
    config_class, model_class = (
        (Qwen3Config, Qwen3ForCausalLM) if kind == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    )
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": kind == "llama-tied",
        "attention_bias": biases,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
    }
    if kind == "llama3":
        sizes["rope_parameters"] = dict(LLAMA3_ROPE)
    if kind != "qwen3":
        sizes["mlp_bias"] = biases
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**sizes))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory, vocab_size)
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer whose ids are all in use, with a chat template.

    From 259 ids on it is one of bytes: 256 bytes, `SPECIAL_TOKENS`, then fillers. Below, of words:
    the special tokens, then `w3`, `w4`, ...
    """
    if vocab_size >= 256 + len(SPECIAL_TOKENS):
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
        first_special = len(words)
        words += SPECIAL_TOKENS
        words += [f"<extra_{i}>" for i in range(len(words), vocab_size)]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        first_special = 0
        words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(len(SPECIAL_TOKENS), vocab_size))]
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[-1]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[first_special : first_special + len(SPECIAL_TOKENS)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def load_target(directory: Path) -> PreTrainedModel:
    """Transformers' float32 model of a target, ready to evaluate."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def train_pair(
    target_dir: Path,
    drafter_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 48,
    num_steps: int = 100,
    seed: int = 0,
) -> None:
    """Teach the drafter the target's greedy continuations of `prompts`, for partial acceptance."""
    # A caller may well be in inference mode, where nothing can be trained.
    with torch.inference_mode(False), torch.enable_grad():
        target = load_target(target_dir)
        sequences = [
            [*prompt, *generate(target, None, prompt, max_new_tokens).token_ids]
            for prompt in prompts
        ]
        train_drafter(drafter_dir, target, sequences, num_steps=num_steps, seed=seed)
