"""Generating samples with a tiny target: what is written, and that an interrupt costs nothing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.llm import LLM
from tests.tiny import Kind
from training.generation import Generator, finished
from training.prompts import TASKS, Job, file_jobs, own_jobs

MAX_TOKENS = 6


@pytest.fixture(scope="module")
def llm(targets: Callable[[Kind], Path]) -> Iterator[LLM]:
    with LLM(
        str(targets("llama")),
        backend="eager",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        threads_per_shard=1,
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random target says takes several tokens for each of its own when it is read again."""
    for name in ("chat", "summarization"):
        task = replace(TASKS[name], least_tokens=2, most_tokens=8)
        monkeypatch.setitem(TASKS, name, task)  # type: ignore[arg-type]


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    file = tmp_path / "questions.jsonl"
    rows = [
        {"prompt": "How are you?"},
        {"turns": ["Secret question", "and more"], "category": "math"},
        {"prompt": "x" * 200},
        {"prompt": " "},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*file_jobs(file, 0.5, 0), *own_jobs(4, ["chat", "summarization"], 0.5, 0)]


def run(llm: LLM, jobs: list[Job], out: Path, on_job: Callable[[], None] = lambda: None) -> None:
    generator = Generator(llm, max_tokens=MAX_TOKENS, concurrency=4, thinking=None)
    generator.run(jobs, out, excluded={"secret question"}, jobs_at_once=3, on_job=on_job)


def rows_of(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_say_what_was_asked_and_answered(llm: LLM, jobs: list[Job], tmp_path: Path) -> None:
    out, counted = tmp_path / "out.jsonl", []
    run(llm, jobs, out, lambda: counted.append(1))
    rows = rows_of(out)
    assert [row["id"] for row in rows] == [job.id for job in jobs]
    assert len(counted) == len(jobs)
    assert rows[0]["category"] == "questions"
    assert rows[0]["prompt_ids"] == llm.encode_chat([{"role": "user", "content": "How are you?"}])
    assert len(rows[0]["response_ids"]) == MAX_TOKENS  # type: ignore[arg-type]
    assert [row.get("skipped") for row in rows[1:4]] == [
        "it is in an excluded file",
        "its 219 tokens leave no room for 6 more",
        "it is empty",
    ]
    assert all("prompt_ids" in row or "skipped" in row for row in rows[4:])
    assert any("prompt_ids" in row for row in rows[4:])


def test_an_interrupted_file_ends_up_the_same(llm: LLM, jobs: list[Job], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(llm, jobs, whole)
    for stop_after in (4, 7):
        counted = []

        def stop(counted: list[int] = counted, after: int = stop_after) -> None:
            counted.append(1)
            if len(counted) == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(llm, jobs, parts, stop)
    assert len(rows_of(parts)) == 6, "two groups of three"
    with parts.open("a") as file:
        file.write('{"id": "torn')
    run(llm, jobs, parts)
    assert parts.read_text() == whole.read_text()
    assert finished(parts) == {job.id for job in jobs}


def test_thinking_is_told_to_the_template(llm: LLM, tmp_path: Path) -> None:
    template = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = "{% if enable_thinking %}think {% endif %}" + str(template)
    try:
        job = Job(id="a", category="", text="hm", opening="", seed=0, temperature=0)
        lengths = []
        for thinking in (None, True, False):
            out = tmp_path / f"{thinking}.jsonl"
            generator = Generator(llm, max_tokens=2, concurrency=1, thinking=thinking)
            generator.run([job], out, excluded=(), jobs_at_once=1, on_job=lambda: None)
            lengths.append(len(rows_of(out)[0]["prompt_ids"]))  # type: ignore[arg-type]
        assert lengths[1] == lengths[0] + 6
        assert lengths[2] == lengths[0]
    finally:
        llm.tokenizer.chat_template = template
