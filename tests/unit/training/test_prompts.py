"""Which prompts are asked for, and which are not used."""

from collections import Counter
from pathlib import Path

import pytest

from training.prompts import (
    TASKS,
    check_tasks,
    excluded_texts,
    file_jobs,
    own_jobs,
    reason_to_skip,
    user_turn_prefix,
)
from training.recipe import TrainingRefused


def test_own_prompts_are_mixed_by_weight() -> None:
    jobs = own_jobs(4000, list(TASKS), 0.25, 0)
    counts = Counter(job.category for job in jobs)
    total = sum(task.weight for task in TASKS.values())
    for name, task in TASKS.items():
        assert counts[name] == pytest.approx(4000 * task.weight / total, rel=0.2)
        openings = {job.opening for job in jobs if job.category == name}
        assert openings == set(task.openings)
    assert sum(job.temperature > 0 for job in jobs) == pytest.approx(1000, rel=0.1)
    assert len({job.seed for job in jobs}) == 4000


def test_more_prompts_begin_with_the_same() -> None:
    assert own_jobs(10, ["chat", "code"], 0.5, 1)[:4] == own_jobs(4, ["chat", "code"], 0.5, 1)
    assert own_jobs(4, ["chat"], 0.5, 1) != own_jobs(4, ["chat"], 0.5, 2)


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(TrainingRefused, match="task 'poems' is none of chat, "):
        check_tasks(["code", "poems"])


def test_a_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": []}\n')
    with pytest.raises(TrainingRefused, match=r"p\.jsonl:2: not a row with a prompt"):
        list(file_jobs(file, 0, 0))


def test_turns_of_evaluation_files_are_not_used(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text('{"turns": ["What is  DFlash?", "And then?"]}\n')
    excluded = excluded_texts([file])
    assert reason_to_skip("what is dflash?\n", excluded)
    assert reason_to_skip("And then?", excluded)
    assert reason_to_skip("What is Ray?", excluded) is None
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(TrainingRefused, match=r"bench\.jsonl:1: not a row with turns"):
        excluded_texts([file])


def test_degenerate_prompts_are_not_used() -> None:
    assert reason_to_skip(" \n", ()) == "it is empty"
    assert reason_to_skip("go on and " * 10, ()) == "it repeats itself"
    assert reason_to_skip("go on and on", ()) is None


def test_the_prefix_is_what_stands_before_the_users_words() -> None:
    assert user_turn_prefix(lambda m: f"<user>{m[0]['content']}<end>") == "<user>"
    with pytest.raises(TrainingRefused, match="the chat template does not contain"):
        user_turn_prefix(lambda m: m[0]["content"].upper())
