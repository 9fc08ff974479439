"""A `StepPlan` as the padded tensors of its bucket."""

import torch

from actors.messages import DecodeRow, PrefillRow, StepPlan
from models.rows import StepInputs
from models.state import SlotState


def write_page_updates(plan: StepPlan, state: SlotState) -> None:
    """Apply the plan's page-table changes to the slots' block tables."""
    for update in plan.page_updates:
        pages = torch.tensor(update.pages, dtype=torch.int32)
        state.block_table[update.slot, update.first : update.first + len(update.pages)] = pages


def step_inputs(plan: StepPlan, scratch_slot: int) -> StepInputs:
    """Every tensor has its bucket's size; padded rows point at `scratch_slot`."""
    bucket = plan.bucket
    assert bucket is not None
    decode, prefill = plan.decode, plan.prefill

    def decode_ints(values: list[int], fill: int = 0) -> torch.Tensor:
        return _padded(values, bucket.decode_rows, fill)

    def prefill_ints(values: list[int], fill: int = 0) -> torch.Tensor:
        return _padded(values, bucket.prefill_rows, fill)

    def emitting_ints(values: list[int], fill: int = 0) -> torch.Tensor:
        return _padded(values, bucket.emitting_rows, fill)

    last = [i for i, row in enumerate(prefill) if row.last]
    rows: list[DecodeRow | PrefillRow] = [*decode, *(prefill[i] for i in last)]
    padding = bucket.emitting_rows - len(rows)
    tokens = torch.zeros(bucket.prefill_rows, bucket.prefill_width, dtype=torch.int32)
    for i, row in enumerate(prefill):
        tokens[i, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int32)
    return StepInputs(
        verify_width=bucket.verify_width,
        num_tokens=bucket.num_tokens,
        context_pages=bucket.context_pages,
        decode_slots=decode_ints([row.slot for row in decode], scratch_slot),
        decode_positions=decode_ints([row.position for row in decode]),
        decode_num_drafts=decode_ints([row.num_drafts for row in decode]),
        decode_in_flight=decode_ints([row.prev_in_flight for row in decode]).bool(),
        decode_valid=decode_ints([1] * len(decode)).bool(),
        prefill_slots=prefill_ints([row.slot for row in prefill], scratch_slot),
        prefill_starts=prefill_ints([row.start for row in prefill]),
        prefill_counts=prefill_ints([len(row.token_ids) for row in prefill]),
        prefill_tokens=tokens,
        prefill_fresh=prefill_ints([row.fresh for row in prefill]).bool(),
        emitting=emitting_ints(
            [*range(len(decode)), *(bucket.decode_rows + i for i in last)], fill=-1
        ),
        propose=emitting_ints([row.propose for row in rows]).bool(),
        temperatures=torch.tensor(
            [row.temperature for row in rows] + [0.0] * padding, dtype=torch.float32
        ),
        # Halves, since devices have no 64-bit integers.
        seeds=torch.tensor([row.seed for row in rows] + [0] * padding, dtype=torch.int64)
        .view(torch.int32)
        .view(-1, 2),
    )


def _padded(values: list[int], size: int, fill: int) -> torch.Tensor:
    return torch.tensor([*values, *[fill] * (size - len(values))], dtype=torch.int32)
