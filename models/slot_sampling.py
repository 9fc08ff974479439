"""What the device knows of how each slot's request is sampled, and the tokens it was fed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers import LMHead
from models.logits import edit, forbid, penalize
from models.scores import SamplingRows


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Tables with one row per slot and a last, greedy one for padded rows.

    Meanings are those of `actors.messages.SlotSampling`. `history` holds the fed tokens by their
    position, like a KV cache: what lies beyond the position of a row is never read. It is kept by
    the steps that read it, which are all that feed tokens of a request that needs it.
    """

    temperature: Tensor  # [slots] float32
    top_p: Tensor  # [slots] float32
    min_p: Tensor  # [slots] float32
    top_k: Tensor  # [slots] int32
    seeds: Tensor  # [slots, 2] int32, low and high half of 64 bits
    presence: Tensor  # [slots] float32
    frequency: Tensor  # [slots] float32
    repetition: Tensor  # [slots] float32
    prompt_lens: Tensor  # [slots] int32
    edit_ids: Tensor  # [slots, edits] int32, -1 padded
    edit_values: Tensor  # [slots, edits] float32
    edit_until: Tensor  # [slots, edits] int32
    bad_words: Tensor  # [slots, words, length] int32, right-aligned, -1 padded
    history: Tensor  # [slots, positions] int32

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        *,
        num_positions: int,
        num_edits: int,
        num_bad_words: int,
        bad_word_length: int,
    ) -> "SamplingState":
        """Greedy slots, each of 4 * (10 + positions + 3 * edits + words * length) bytes."""
        rows = num_slots + 1

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((rows, *shape), fill, dtype=torch.int32)

        return cls(
            temperature=torch.zeros(rows),
            top_p=torch.ones(rows),
            min_p=torch.zeros(rows),
            top_k=ints(),
            seeds=ints(2),
            presence=torch.zeros(rows),
            frequency=torch.zeros(rows),
            repetition=torch.ones(rows),
            prompt_lens=ints(),
            edit_ids=ints(num_edits, fill=-1),
            edit_values=torch.zeros(rows, num_edits),
            edit_until=ints(num_edits),
            bad_words=ints(num_bad_words, bad_word_length, fill=-1),
            history=ints(num_positions),
        )

    def write(
        self,
        slot: int,
        *,
        temperature: float,
        top_p: float,
        min_p: float,
        top_k: int,
        seed: tuple[int, int],
        presence: float,
        frequency: float,
        repetition: float,
        prompt_len: int,
        edits: Sequence[tuple[int, float, int]],
        bad_words: Sequence[Sequence[int]],
        history: Sequence[int],
    ) -> None:
        """Replace what is known of `slot`; `edits` are id, addend and until, `seed` two halves,
        `history` the tokens in front of those that will be fed."""
        self.temperature[slot] = temperature
        self.top_p[slot] = top_p
        self.min_p[slot] = min_p
        self.top_k[slot] = top_k
        self.seeds[slot] = torch.tensor(seed, dtype=torch.int32)
        self.presence[slot] = presence
        self.frequency[slot] = frequency
        self.repetition[slot] = repetition
        self.prompt_lens[slot] = prompt_len
        self.edit_ids[slot] = -1
        if edits:
            columns = zip(*edits, strict=True)
            tables = (self.edit_ids, self.edit_values, self.edit_until)
            for table, values in zip(tables, columns, strict=True):
                table[slot, : len(values)] = torch.tensor(values, dtype=table.dtype)
        self.bad_words[slot] = -1
        for i, word in enumerate(bad_words):
            self.bad_words[slot, i, -len(word) :] = torch.tensor(word, dtype=torch.int32)
        self.history[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)

    def rows(self, slots: Tensor, positions: Tensor) -> SamplingRows:
        """For choices at `positions [rows] int32` of the requests in `slots [rows] int32`."""
        return SamplingRows(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            top_k=self.top_k[slots],
            seeds=self.seeds[slots],
            positions=positions,
        )

    def feed(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Remember fed tokens; all `[rows] int32`."""
        self.history.index_put_((slots, positions), tokens)

    def shape(
        self, logits: Tensor, slots: Tensor, positions: Tensor, length: int, head: LMHead
    ) -> Tensor:
        """This rank's `logits [rows, local vocabulary]` as float32, with bad words, edits and
        penalties applied. `slots` and `positions` as in `rows`, all positions up to `length`.
        """
        history = self.history[:, :length][slots]
        places = torch.arange(history.shape[1], dtype=torch.int32, device=history.device)
        history = history.masked_fill(places >= positions.unsqueeze(1), -1)
        prompt_lens = self.prompt_lens[slots]
        logits = forbid(logits, self.bad_words[slots], history, prompt_lens, head)
        logits = edit(
            logits,
            self.edit_ids[slots],
            self.edit_values[slots],
            self.edit_until[slots],
            positions,
            head,
        )
        return penalize(
            logits,
            history,
            prompt_lens,
            self.presence[slots],
            self.frequency[slots],
            self.repetition[slots],
            head,
        )
