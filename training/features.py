"""Captured states of the target, computed once and kept on disk."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.kv_cache import LayerKV
from models.ops import Grid
from models.target import Target
from training.recipe import TrainingRefused
from training.samples import read_rows

_INDEX, _VALUES, _SIGNATURE = "index.jsonl", "values.bin", "signature.json"
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Features:
    """What the target computed for one sequence of n tokens.

    `aux [n - 1, features]`, the states behind all but the last token; `top_ids [n - 1, k] int32`
    and `top_probs [n - 1, k] float32`: row i says what the target expects at position i + 1.
    """

    aux: Tensor
    top_ids: Tensor
    top_probs: Tensor


def empty_kv(model: Any, num_tokens: int, device: torch.device | None = None) -> list[LayerKV]:
    """One page of `num_tokens` for each layer of a target or drafter."""
    return [
        LayerKV(
            *(
                torch.zeros(
                    1, num_tokens, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device
                )
                for _ in range(2)
            )
        )
        for spec in model.kv_specs()
    ]


@torch.no_grad()
def capture(target: Target, token_ids: Sequence[int], top_k: int) -> Features:
    """Run the target over a sequence, as the engine prefills it."""
    device = target.embed.weight.device
    tokens = torch.tensor(token_ids[:-1], dtype=torch.int32, device=device)
    length = len(tokens)
    positions = torch.arange(length, dtype=torch.int32, device=device)
    table, slots = torch.zeros(2, 1, 1, dtype=torch.int32, device=device)
    valid = torch.ones(1, length, dtype=torch.bool, device=device)
    grid = Grid(slots[0], positions.unsqueeze(0), valid)
    context = target.ops.causal_context(table, [grid], length, 1, length)
    kv = empty_kv(target, length, device)
    hidden, aux = target(tokens, positions, positions, context, kv)
    if not top_k:
        none = torch.empty(length, 0)
        return Features(aux, none.int(), none)
    tops = [target.logits(part).float().topk(top_k, dim=-1) for part in hidden.split(256)]
    values, ids = (torch.cat(each) for each in zip(*tops, strict=True))
    return Features(aux, ids.int(), values.softmax(dim=-1))


class FeatureCache:
    """Features by the tokens they belong to, in `directory`.

    Values are appended before their line in the index, so what an interrupt cut off is computed
    again. `signature` says what they depend on beside the tokens.
    """

    def __init__(
        self, directory: Path, signature: dict[str, Any], width: int, dtype: torch.dtype, top_k: int
    ) -> None:
        """`width` is the number of captured values of a token. Raises `TrainingRefused` where the
        directory holds those of something else."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._width, self._dtype, self._top_k = directory, width, dtype, top_k
        signature = {**signature, "width": width, "dtype": str(dtype), "top_k": top_k}
        path = directory / _SIGNATURE
        if not path.is_file():
            path.write_text(json.dumps(signature) + "\n", encoding="utf-8")
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, value in signature.items():
            if found.get(name) != value:
                raise TrainingRefused(
                    f"{directory} holds features with {name} {found.get(name)}, not {value}; "
                    "give another folder"
                )
        self._index: dict[str, tuple[int, int]] = {}
        index = directory / _INDEX
        if index.is_file():
            cut_torn_line(index)
            for _, row in read_rows(index):
                self._index[row["key"]] = (row["offset"], row["tokens"])
        self._map: Any = None

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        return _key(token_ids) in self._index

    def fill(
        self,
        sequences: Iterable[Sequence[int]],
        compute: Callable[[Sequence[int]], Features],
        on_done: Callable[[], None],
    ) -> None:
        """Compute what is missing. Raises `TrainingRefused` where the disk has no room for it."""
        missing = {_key(tokens): tokens for tokens in sequences if tokens not in self}
        size = sum(self._record_bytes(len(tokens) - 1) for tokens in missing.values())
        free = shutil.disk_usage(self._directory).free - _SPARE_BYTES
        if size > free:
            raise TrainingRefused(
                f"{self._directory}: the features take {size / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free; give another folder or less data"
            )
        values, index = self._directory / _VALUES, self._directory / _INDEX
        with values.open("ab") as data, index.open("a", encoding="utf-8") as lines:
            for key, tokens in missing.items():
                features = compute(tokens)
                offset = data.tell()
                for part in (features.aux.to(self._dtype), features.top_ids, features.top_probs):
                    data.write(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                data.flush()
                os.fdatasync(data.fileno())
                rows = len(tokens) - 1
                row = {"key": key, "offset": offset, "tokens": rows}
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                self._index[key] = (offset, rows)
                on_done()
        self._map = None

    def get(self, token_ids: Sequence[int]) -> Features:
        """The features of a sequence that `fill` was given."""
        if self._map is None:
            self._map = np.memmap(self._directory / _VALUES, dtype=np.uint8, mode="r")
        offset, rows = self._index[_key(token_ids)]
        record = torch.from_numpy(self._map[offset : offset + self._record_bytes(rows)].copy())
        aux_bytes, top_bytes = rows * self._width * self._dtype.itemsize, rows * self._top_k * 4
        aux, ids, probs = record.split([aux_bytes, top_bytes, top_bytes])
        return Features(
            aux.view(self._dtype).view(rows, self._width),
            ids.view(torch.int32).view(rows, self._top_k),
            probs.view(torch.float32).view(rows, self._top_k),
        )

    def _record_bytes(self, rows: int) -> int:
        return rows * (self._width * self._dtype.itemsize + 8 * self._top_k)


def cut_torn_line(path: Path) -> None:
    """Drop the end of a file of lines that an interrupt left without its newline."""
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)


def _key(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).hexdigest()[:32]
