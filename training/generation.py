"""Responses of the target to prompts, appended to a JSONL file that an interrupt leaves whole."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from actors.llm import LLM
from actors.messages import SamplingParams
from training.features import cut_torn_line
from training.prompts import TASKS, Job, reason_to_skip, user_turn_prefix
from training.samples import read_rows

# Tokens that a template may put between a user's words and the response.
_TURN_END = 16


class Generator:
    """Generates with `llm`; `thinking` is what its chat template is told, None tells nothing."""

    def __init__(
        self, llm: LLM, *, max_tokens: int, concurrency: int, thinking: bool | None
    ) -> None:
        self._llm, self._max_tokens, self._concurrency = llm, max_tokens, concurrency
        self._template_args: dict[str, Any] = {}
        if thinking is not None:
            self._template_args["enable_thinking"] = thinking
        self._prefix: list[int] | None = None

    def run(
        self,
        jobs: Sequence[Job],
        out: Path,
        *,
        excluded: Collection[str],
        jobs_at_once: int,
        on_job: Callable[[], None],
    ) -> None:
        """Append a row for each job that `out` lacks, `jobs_at_once` at a time.

        A row has `prompt_ids` and `response_ids`, or says why it was `skipped`. Each group of rows
        is written at once; what is done again after an interrupt comes out the same.
        """
        done = finished(out)
        for _ in done:
            on_job()
        left = (job for job in jobs if job.id not in done)
        with out.open("ab") as file:
            while group := list(islice(left, jobs_at_once)):
                rows = self._rows(group, excluded, on_job)
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())

    def _rows(
        self, jobs: Sequence[Job], excluded: Collection[str], on_job: Callable[[], None]
    ) -> list[dict[str, Any]]:
        texts = self._texts(jobs)
        rows: dict[str, dict[str, Any]] = {}
        asked: list[tuple[Job, list[int]]] = []
        for job, text in zip(jobs, texts, strict=True):
            row: dict[str, Any] = {"id": job.id, "category": job.category}
            rows[job.id] = row
            reason = reason_to_skip(text, excluded)
            ids = self._encode(text)
            room = self._llm.config.max_model_len - len(ids)
            if reason is None and room < self._max_tokens:
                reason = f"its {len(ids)} tokens leave no room for {self._max_tokens} more"
            if reason is not None:
                row["skipped"] = reason
                on_job()
                continue
            asked.append((job, ids))
        outputs = self._llm.generate(
            [ids for _, ids in asked],
            [
                SamplingParams(
                    max_tokens=self._max_tokens, temperature=job.temperature, seed=job.seed
                )
                for job, _ in asked
            ],
            on_finish=on_job,
            max_in_flight=self._concurrency,
        )
        for (job, ids), output in zip(asked, outputs, strict=True):
            rows[job.id] |= {
                "prompt_ids": ids,
                "response_ids": list(output.token_ids),
                "temperature": job.temperature,
            }
        return list(rows.values())

    def _texts(self, jobs: Sequence[Job]) -> list[str]:
        """The prompts, those made up that have none."""
        made = [job for job in jobs if job.text is None]
        prefix = self._turn_prefix() if made else []
        openings = [self._tokens(job.opening) for job in made]
        outputs = self._llm.generate(
            [[*prefix, *opening] for opening in openings],
            [
                self._turn_sampling(job, len(prefix) + len(opening))
                for job, opening in zip(made, openings, strict=True)
            ],
            max_in_flight=self._concurrency,
        )
        texts = {
            job.id: (job.opening + output.text).strip()
            for job, output in zip(made, outputs, strict=True)
        }
        return [texts[job.id] if job.text is None else job.text for job in jobs]

    def _turn_sampling(self, job: Job, num_before: int) -> SamplingParams:
        """How the rest of a user's turn is drawn behind `num_before` tokens, such that a response
        has room behind it."""
        task = TASKS[job.category]
        room = self._llm.config.max_model_len - self._max_tokens - num_before - _TURN_END
        most = max(1, min(task.most_tokens, room))
        return SamplingParams(
            max_tokens=most,
            min_tokens=min(task.least_tokens, most),
            temperature=1.0,
            top_p=0.95,
            seed=job.seed,
        )

    def _turn_prefix(self) -> list[int]:
        if self._prefix is None:
            tokenizer = self._llm.tokenizer
            text = user_turn_prefix(
                lambda messages: tokenizer.apply_chat_template(
                    messages, tokenize=False, **self._template_args
                )
            )
            self._prefix = self._tokens(text)
        return self._prefix

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._llm.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=False,
            **self._template_args,
        )
        return ids


def finished(out: Path) -> set[str]:
    """The ids of the jobs in `out`; a line that an interrupt cut off is dropped from it."""
    if not out.is_file():
        return set()
    cut_torn_line(out)
    return {row["id"] for _, row in read_rows(out)}
