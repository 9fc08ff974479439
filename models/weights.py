"""Streamed loading: a rank reads exactly the slices of a safetensors checkpoint it holds."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from models.config_fields import CheckpointRefused, Fields
from models.parallel import Part


class CheckpointReader:
    """Reads tensors and slices of tensors from `*.safetensors` in a directory.

    A context manager. `bytes_read` counts what was asked of the files, `names_read` which tensors:
    together they show that nothing is read in vain or left unread.
    """

    def __init__(self, directory: Path) -> None:
        """Raises `CheckpointRefused` where there are no safetensors files."""
        self.directory = directory
        self.bytes_read = 0
        self.names_read: set[str] = set()
        self._files: dict[Path, Any] = {}
        self._location = _locate(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.__exit__(kind, error, tb)
        self._files.clear()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._location)

    def read(
        self,
        name: str,
        part: Part | None = None,
        dtype: torch.dtype | None = None,
        *,
        expect: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The tensor `name`, or the rank's `part` of it, contiguous and cast to `dtype`.

        Raises `CheckpointRefused` naming a tensor the checkpoint lacks, or one that does not have
        the shape to `expect` of the whole, or does not hold the part.
        """
        if name not in self._location:
            raise CheckpointRefused(f"{self.directory}: tensor {name} is missing")
        self.names_read.add(name)
        source = self._file(self._location[name]).get_slice(name)
        if expect is not None and tuple(source.get_shape()) != expect:
            raise CheckpointRefused(
                f"{self.directory}: tensor {name} has shape {list(source.get_shape())}, "
                f"config.json makes it {list(expect)}"
            )
        if part is None:
            return self._counted(source[...]).to(dtype).contiguous()
        shape = list(source.get_shape())
        needed = max((piece.stop for piece in part.pieces), default=0)
        if part.dim >= len(shape) or shape[part.dim] < needed:
            raise CheckpointRefused(
                f"{self.directory}: tensor {name} has shape {shape}, dimension {part.dim} must "
                f"hold at least {needed}"
            )
        shape[part.dim] = part.size
        slices = [
            self._counted(source[(slice(None),) * part.dim + (slice(p.start, p.stop),)])
            for p in part.pieces
        ]
        if len(slices) == 1 and slices[0].shape[part.dim] == part.size:
            return slices[0].to(dtype).contiguous()
        kept = dtype or (slices[0].dtype if slices else torch.get_default_dtype())
        result = torch.zeros(shape, dtype=kept)
        for piece, values in zip(part.pieces, slices, strict=True):
            result.narrow(part.dim, piece.local, piece.stop - piece.start).copy_(values)
        return result

    def _counted(self, values: Tensor) -> Tensor:
        self.bytes_read += values.numel() * values.element_size()
        return values

    def _file(self, path: Path) -> Any:
        if not path.is_file():
            raise CheckpointRefused(f"{path.parent}: {path.name} is named in the index and missing")
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt").__enter__()
        return self._files[path]


def _locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index where the checkpoint is split."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = Fields.read(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointRefused(f"{index}: weight_map is {weight_map!r:.80}, not an object")
        for file in weight_map.values():
            # A checkpoint is untrusted: its index must not lead out of its directory.
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointRefused(f"{index}: {file!r} is not the name of a file beside it")
        return {name: directory / file for name, file in weight_map.items()}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointRefused(f"{directory}: no *.safetensors file; other formats are not loaded")
    location = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            location.update(dict.fromkeys(file.keys(), path))
    return location
