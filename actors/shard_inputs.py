"""A `StepPlan` as the padded tensors of its bucket."""

from array import array
from collections.abc import Iterable
from struct import Struct

import torch

from actors.messages import DecodeRow, PrefillRow, StepPlan
from models.rows import StepInputs
from models.slot_sampling import SamplingState

_SEED, _HALVES = Struct("=q"), Struct("=2i")


def write_page_updates(plan: StepPlan, block_table: torch.Tensor) -> None:
    """Apply the plan's page-table changes to the slots' rows of `[slots, pages] int32`."""
    for update in plan.page_updates:
        pages = torch.tensor(update.pages, dtype=torch.int32)
        block_table[update.slot, update.first : update.first + len(update.pages)] = pages


def write_samplings(plan: StepPlan, state: SamplingState) -> None:
    """Tell the slots that requests take in this plan how these are sampled."""
    for sampling in plan.samplings:
        # 64 bits as halves, since devices have no 64-bit integers.
        low, high = _HALVES.unpack(_SEED.pack(sampling.seed))
        state.write(
            sampling.slot,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
            seed=(low, high),
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            repetition=sampling.repetition_penalty,
            prompt_len=sampling.prompt_len,
            edits=sampling.edits,
            bad_words=sampling.bad_words,
            history=sampling.history,
        )


def step_inputs(plan: StepPlan, scratch_slot: int, vocab_size: int) -> StepInputs:
    """Every tensor has its bucket's size; padded rows point at `scratch_slot`.

    All are views of two buffers: the device thread computes meanwhile, and every torch call made
    here takes the interpreter from it.
    """
    bucket = plan.bucket
    assert bucket is not None
    decode, prefill = plan.decode, plan.prefill
    last = [i for i, row in enumerate(prefill) if row.last]
    rows: list[DecodeRow | PrefillRow] = [*decode, *(prefill[i] for i in last)]
    num_decode, num_prefill, num_emitting = (
        bucket.decode_rows,
        bucket.prefill_rows,
        bucket.emitting_rows,
    )
    ints = _Columns(array("i"))
    ints.add((row.slot for row in decode), num_decode, fill=scratch_slot)
    ints.add((row.position for row in decode), num_decode)
    ints.add((row.num_drafts for row in decode), num_decode)
    ints.add((row.slot for row in prefill), num_prefill, fill=scratch_slot)
    ints.add((row.start for row in prefill), num_prefill)
    ints.add((len(row.token_ids) for row in prefill), num_prefill)
    ints.add((*range(len(decode)), *(num_decode + i for i in last)), num_emitting, fill=-1)
    ints.add((bucket.num_drafts * row.propose for row in rows), num_emitting)
    ints.add((row.next_token_id for row in prefill), num_prefill, fill=-1)
    width = bucket.prefill_width
    tokens = array("i", bytes(4 * num_prefill * width))
    for i, row in enumerate(prefill):
        tokens[i * width : i * width + len(row.token_ids)] = array("i", row.token_ids)
    ints.add(tokens, len(tokens))
    flags = _Columns(array("b"))
    flags.add((row.prev_in_flight for row in decode), num_decode)
    flags.add((True for _ in decode), num_decode)
    flags.add((row.fresh for row in prefill), num_prefill)

    (
        decode_slots,
        decode_positions,
        decode_num_drafts,
        prefill_slots,
        prefill_starts,
        prefill_counts,
        emitting,
        proposed,
        prefill_next,
        prefill_tokens,
    ) = ints.tensors(torch.int32)
    masks, masked = _masks(plan, -(-vocab_size // 32)) if bucket.guided else (None, None)
    decode_in_flight, decode_valid, prefill_fresh = flags.tensors(torch.bool)
    return StepInputs(
        verify_width=bucket.verify_width,
        num_drafts=bucket.num_drafts,
        num_tokens=bucket.num_tokens,
        context_pages=bucket.context_pages,
        choosing=bucket.choosing,
        num_logprobs=bucket.num_logprobs,
        num_prompt_logprobs=bucket.num_prompt_logprobs,
        decode_slots=decode_slots,
        decode_positions=decode_positions,
        decode_num_drafts=decode_num_drafts,
        decode_in_flight=decode_in_flight,
        decode_valid=decode_valid,
        prefill_slots=prefill_slots,
        prefill_starts=prefill_starts,
        prefill_counts=prefill_counts,
        prefill_tokens=prefill_tokens.view(num_prefill, width),
        prefill_next=prefill_next,
        prefill_fresh=prefill_fresh,
        emitting=emitting,
        proposed=proposed,
        masks=masks,
        masked=masked,
    )


def _masks(plan: StepPlan, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`masks` and `masked` of `StepInputs`."""
    bucket, size = plan.bucket, 4 * num_words
    assert bucket is not None
    first_of_prefill = bucket.decode_rows * bucket.verify_width
    num_rows = first_of_prefill + (bucket.emitting_rows if bucket.prefill_rows else 0)
    masks, masked = bytearray(num_rows * size), bytearray(num_rows)
    for i, row in enumerate(plan.emitting):
        place = i * bucket.verify_width if i < len(plan.decode) else first_of_prefill + i
        for mask in row.masks:
            masks[place * size : (place + 1) * size] = mask
            masked[place] = True
            place += 1
    words = torch.frombuffer(masks, dtype=torch.int32).view(num_rows, num_words)
    return words, torch.frombuffer(masked, dtype=torch.bool)


class _Columns:
    """Padded columns one behind the other in one buffer."""

    def __init__(self, buffer: "array[int]") -> None:
        self._buffer = buffer
        self._sizes: list[int] = []

    def add(self, values: Iterable[int], size: int, fill: int = 0) -> None:
        """The next column: `values`, then `fill` up to `size`."""
        start = len(self._buffer)
        self._buffer.extend(values)
        self._buffer.extend([fill] * (start + size - len(self._buffer)))
        self._sizes.append(size)

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Each column, a view of the buffer."""
        if not self._buffer:
            return [torch.empty(0, dtype=dtype) for _ in self._sizes]
        return list(torch.frombuffer(self._buffer, dtype=dtype).split(self._sizes))
