"""Engine configurations and requests made on the spot, without checkpoints."""

from pathlib import Path
from typing import Any, Literal

from actors.config import Buckets, EngineConfig
from actors.messages import GenerateRequest, Guide, SamplingParams
from models.config import DecoderConfig, DrafterConfig, RopeConfig, TargetConfig

VOCAB = 64
EOS = 1
GUIDE = Guide(kind="regex", source="a*")


def decoder_config(num_layers: int, max_positions: int = 4096) -> DecoderConfig:
    return DecoderConfig(
        num_layers=num_layers,
        hidden_size=8,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=10_000.0, parameters={}),
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
        max_position_embeddings=max_positions,
    )


def drafter_config(num_drafts: int, max_positions: int) -> DrafterConfig:
    return DrafterConfig(
        architecture="DFlashDraftModel",
        format="z-lab",
        decoder=decoder_config(1, max_positions),
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        target_hidden_size=8,
        num_target_layers=4,
        block_size=num_drafts + 1,
        mask_token_id=2,
        capture_layer_ids=(1, 2),
    )


def engine_config(
    *,
    num_drafts: int = 3,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    block_size: int = 4,
    num_kv_pages: int | None = None,
    async_scheduling: bool = True,
    verify_widths: tuple[int, ...] | None = None,
    prefill_widths: tuple[int, ...] = (16, 64, 256),
    adaptive_drafts: bool = False,
    enable_prefix_caching: bool = True,
    drafter_positions: int = 4096,
    is_dedicated: bool = False,
    overlap: Literal["auto", "always", "never"] = "never",
) -> EngineConfig:
    """`num_drafts` 0 is an engine without speculation; the pool defaults to one that is ample.

    `verify_widths` defaults to that of a whole block.
    """
    pages = max_num_seqs * -(-max_model_len // block_size) + 1
    return EngineConfig(
        served_model_name="tiny",
        target_path=Path("target"),
        target=TargetConfig(
            architecture="LlamaForCausalLM",
            decoder=decoder_config(4),
            vocab_size=VOCAB,
            tie_word_embeddings=True,
            eos_token_ids=(EOS,),
            dtype="float32",
        ),
        drafter_path=Path("drafter") if num_drafts else None,
        drafter=drafter_config(num_drafts, drafter_positions) if num_drafts else None,
        adaptive_drafts=adaptive_drafts,
        drafter_parallel_size=1 if num_drafts else 0,
        is_dedicated=is_dedicated,
        overlap=overlap,
        tensor_parallel_size=1,
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_pages=num_kv_pages or pages,
        cpus_per_shard=0.5,
        threads_per_shard=1,
        pin_threads=False,
        step_timeout_s=10.0,
        backend="eager",
        exact=False,
        late_compile="log",
        warm_up_timeout_s=10.0,
        exchange_timeout_s=10.0,
        load_timeout_s=10.0,
        neuron_cores_per_shard=None,
        placement_strategy="STRICT_PACK",
        wait_for_nodes=False,
        debug_logits_dir=None,
        buckets=Buckets(
            decode_sequences=doublings(1, max_num_seqs),
            verify_widths=verify_widths or (num_drafts + 1,),
            prefill_widths=prefill_widths,
            context_lengths=doublings(4 * block_size, max_model_len),
        ),
        async_scheduling=async_scheduling,
        enable_prefix_caching=enable_prefix_caching,
        stream_interval_s=0.0,
    )


def doublings(first: int, last: int) -> tuple[int, ...]:
    """`first`, twice that, and so on below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def generate_request(
    request_id: str = "a",
    prompt: int | tuple[int, ...] = 5,
    *,
    max_tokens: int = 4,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    prompt_logprobs: int | None = None,
    presence_penalty: float = 0.0,
    guide: Guide | None = None,
    **changes: Any,
) -> GenerateRequest:
    """`prompt` is the token ids, or how many of them; `changes` are fields of the request."""
    if isinstance(prompt, int):
        prompt = tuple((3 + i) % VOCAB for i in range(prompt))
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=presence_penalty,
            guide=guide,
        ),
        **changes,
    )
