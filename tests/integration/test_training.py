"""From a target to a served drafter: what training aligns, serving finds aligned."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.llm import LLM
from actors.messages import SamplingParams
from tests.tiny import Kind, make_target
from training import blocks
from training.blocks import NO_LABEL, Batch
from training.checkpoint import RunFolder
from training.export import export
from training.recipe import Recipe
from training.run import Run, choose, prepare, train

BLOCK, NUM_TOKENS = 5, 40
PROMPT = [3, 14, 15, 92, 65, 35, 8, 97, 93, 23, 84]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Served:
    """A target and the greedy response it gives to PROMPT when served."""

    target: Path
    response: list[int]


def served(target: Path, drafter: Path | None, prompts: Sequence[Sequence[int]]) -> Any:
    """Outputs of the engine, every step verifying all drafts."""
    speculative = {"method": "dflash", "model": str(drafter), "adaptive": False}
    with LLM(
        str(target),
        speculative_config=speculative if drafter else None,
        backend="eager",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        threads_per_shard=1,
    ) as llm:
        return llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    kind: Kind = request.param
    target = make_target(tmp_path_factory.mktemp(kind) / "target", kind)
    return Served(target, list(served(target, None, [PROMPT])[0].token_ids))


def make_run(folder: Path, memory: Served, num_steps: int = 250, **changes: Any) -> Run:
    """Trains on nothing but the served response."""
    data = folder / "one.jsonl"
    data.write_text(json.dumps({"prompt_ids": PROMPT, "response_ids": memory.response}) + "\n")
    recipe: dict[str, Any] = {
        "block_size": BLOCK,
        "num_layers": 2,
        "target_layer_ids": (0, 2, 3),
        "mask_token_id": 299,
        "anchors": 64,
        "step_positions": 1,
        "optimizer": "adamw",
        "learning_rate": 5e-3,
        "dtype": "float32",
    }
    return choose(
        Run(
            folder=RunFolder(folder),
            target=memory.target,
            target_name="tiny",
            recipe=Recipe(**recipe | changes),
            data=(data,),
            features=folder / "features",
            num_steps=num_steps,
            every=num_steps,
        )
    )


def acceptance_length(memory: Served, folder: Path) -> float:
    (output,) = served(memory.target, folder / "drafter", [PROMPT])
    assert list(output.token_ids) == memory.response, "whatever is drafted"
    return float(output.speculation.mean_acceptance_length)


# Verify steps give NUM_TOKENS - 1 tokens, the last of them what is left.
FULL = (NUM_TOKENS - 1) / -(-(NUM_TOKENS - 1) // BLOCK)


def test_what_is_learnt_by_heart_is_accepted_in_full(memory: Served, tmp_path: Path) -> None:
    run = make_run(tmp_path, memory)
    prepare(run)
    train(run)
    assert acceptance_length(memory, tmp_path) == FULL


@pytest.mark.parametrize("planted", ["layers", "positions", "labels"])
def test_planted_shifts_are_found(
    memory: Served, tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, memory)
    if planted == "layers":
        # The states of the layers before, as if z-lab's ids were of inputs already.
        shifted = property(lambda self: self.recipe.target_layer_ids)
        monkeypatch.setattr(Run, "capture_layer_ids", shifted)
    else:
        original = blocks.make_batch

        def shift(*args: Any) -> Batch:
            batch = original(*args)
            if planted == "positions":
                # Of the context, against those of the block.
                return replace(batch, positions=batch.positions + 1)
            # The first draft's label is the token behind the one behind the anchor.
            unknown = torch.full_like(batch.labels[:, :1], NO_LABEL)
            return replace(batch, labels=torch.cat([batch.labels[:, 1:], unknown], dim=1))

        monkeypatch.setattr("training.trainer.make_batch", shift)
    prepare(run)
    train(run)
    monkeypatch.undo()
    assert acceptance_length(memory, tmp_path) < FULL


@pytest.mark.parametrize("format", ["z-lab", "speculators"])
def test_a_qwen3_drafter_from_scratch_is_served(tmp_path: Path, format: Any) -> None:
    target = make_target(tmp_path / "target", "qwen3")
    prompts = [[(7 * i + 11 * j) % 250 for j in range(8)] for i in range(6)]
    responses = served(target, None, prompts)
    folder = tmp_path / "run"
    folder.mkdir()
    run = make_run(folder, Served(target, list(responses[0].token_ids)), num_steps=120)
    (folder / "one.jsonl").write_text(
        "".join(
            json.dumps({"prompt_ids": prompt, "response_ids": output.token_ids}) + "\n"
            for prompt, output in zip(prompts, responses, strict=True)
        )
    )
    run = replace(run, recipe=replace(run.recipe, step_positions=400, optimizer="muon"))
    prepare(run)
    train(run)
    export(run.folder, tmp_path / "out", format, "float32", None)
    outputs = served(target, tmp_path / "out", prompts)
    assert [output.token_ids for output in outputs] == [each.token_ids for each in responses]
    steps = sum(output.speculation.verify_steps for output in outputs)
    emitted = sum(output.speculation.emitted_tokens for output in outputs)
    before = served(target, run.folder.initial, prompts)
    untrained = sum(output.speculation.verify_steps for output in before)
    assert emitted / steps > 1.5
    assert steps < 0.8 * untrained
