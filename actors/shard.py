"""One rank of the target, with its part of a colocated drafter in the same process."""

from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from actors.config import EngineConfig
from actors.limits import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from actors.messages import StepPlan, decode_plan, encode
from actors.rank import Rank
from actors.shard_inputs import step_inputs, write_page_updates, write_samplings
from actors.shard_outputs import HostResult, on_host, step_output
from actors.trace import DEVICE, Trace
from models.backends.backend import Rendezvous
from models.drafting import DrafterRank, DraftInputs
from models.exchange import join_exchange
from models.kv_cache import allocate
from models.registry import DRAFTERS, TARGETS
from models.remote_drafting import RemoteDrafting
from models.scoring import next_token_logits
from models.slot_sampling import SamplingState
from models.state import SlotState
from models.steps import ModelRank, Regions
from models.weights import CheckpointReader


@dataclass(frozen=True, slots=True)
class _InFlight:
    """`exchanged` is the same result with what dedicated drafters proposed in the step."""

    plan: StepPlan
    result: "Future[HostResult]"
    exchanged: "Future[HostResult] | None" = None


class Shard(Rank):
    """One rank of the target, and of its drafter unless that is dedicated. A single one of the
    former kind is an engine's whole `ShardGroup`."""

    drafters = None

    def __init__(self, config: EngineConfig, rank: int, *, trace: Trace | None = None) -> None:
        """`trace` gets a span for every step, on the device's track."""
        super().__init__(config, rank, place=rank)
        self._trace = trace
        self._model: ModelRank | None = None
        self._remote: RemoteDrafting | None = None
        self._in_flight: _InFlight | None = None
        self.bytes_read = 0

    def step(self, payload: bytes) -> bytes:
        """Submit the plan in `payload`, then return the output of the step before it.

        An empty plan submits nothing, and so drains the pipeline. Raises what the step raised.
        """
        plan = decode_plan(payload)
        previous, self._in_flight = self._in_flight, self._submit(plan)
        if previous is None:
            return encode(None)
        bucket = previous.plan.bucket
        assert bucket is not None
        result = previous.result.result()
        # What was emitted is not held back by the drafters, unless the next plan needs the drafts.
        if previous.exchanged is not None and bucket.guided:
            result = previous.exchanged.result()
        return encode(step_output(previous.plan, result, self._backend.late_compiles))

    def join_exchange(self, store: str, host: str) -> None:
        """Meet the dedicated drafters at the `host:port` of their store, between two steps; `host`
        is the address of this rank's machine that they reach.

        Raises `RuntimeError` where they don't come.
        """
        assert self._remote is not None, "load() first"
        remote, config = self._remote, self._config

        def join() -> None:
            exchange = join_exchange(
                store,
                host,
                self._rank,
                config.tensor_parallel_size,
                config.drafter_parallel_size,
                config.exchange_timeout_s,
            )
            remote.join(exchange)

        self._backend.submit(join).result()

    def leave_drafters(self) -> None:
        """Go on without dedicated drafters, until others are joined."""
        assert self._remote is not None, "load() first"
        self._backend.submit(self._remote.leave).result()

    def next_token_logits(self, token_ids: list[int]) -> torch.Tensor:
        """This rank's logits `[vocab]` behind `token_ids`, computed apart from all requests.

        For judging near-ties; only for a single rank, and not while a step is in flight.
        """
        assert self._config.tensor_parallel_size == 1
        assert self._model is not None, "load() first"
        target = self._model.target
        return self._backend.submit(lambda: next_token_logits(target, token_ids)).result()

    def _submit(self, plan: StepPlan) -> _InFlight | None:
        if plan.bucket is None:
            return None
        assert self._model is not None, "load() first"
        model, remote, num_drafts = self._model, self._remote, plan.bucket.num_drafts

        # Made here, while the device is still at the step before.
        with torch.inference_mode():
            inputs = step_inputs(plan, model.state.scratch_slot, model.vocab_size)
        captured: dict[str, torch.Tensor] | None = {} if self._config.debug_logits_dir else None
        left: list[DraftInputs] = []

        def work() -> HostResult:
            with self._span(plan.step):
                write_page_updates(plan, model.state.block_table)
                write_samplings(plan, model.sampling)
                if remote is None:
                    result = on_host(model.step(inputs, captured))
                else:
                    verified, draft_inputs = model.verify(inputs, captured)
                    left.append(draft_inputs)
                    result = on_host(verified, drafters_lost=remote.is_lost)
            if captured is not None:
                self._save(f"step{plan.step:06d}-rank{self._rank}", captured)
            return result

        result = self._backend.submit(work)
        if remote is None:
            return _InFlight(plan, result)

        def exchange() -> HostResult:
            drafts = remote.draft(left.pop(), num_drafts, defer=plan.defers_drafts)
            return result.result()._replace(drafts=[] if drafts is None else drafts.tolist())

        return _InFlight(plan, result, self._backend.submit(exchange))

    def _span(self, step: int) -> AbstractContextManager[Any]:
        return self._trace.span("step", DEVICE, step=step) if self._trace else nullcontext()

    def _load(self, rendezvous: Rendezvous | None) -> None:
        config, backend = self._config, self._backend
        tp = backend.init_rank(self._rank, config.tensor_parallel_size, rendezvous)
        dtype = getattr(torch, config.dtype)
        drafter_config = config.drafter
        with ExitStack() as files:
            reader = files.enter_context(CheckpointReader(config.target_path))
            target = TARGETS[config.target.architecture](
                config.target,
                tp,
                reader,
                dtype=dtype,
                num_positions=config.max_model_len,
                capture_layer_ids=drafter_config.capture_layer_ids if drafter_config else (),
                ops=backend.ops,
            )
            self.bytes_read = reader.bytes_read
            drafter = None
            specs = target.kv_specs()
            if drafter_config is not None and not config.is_dedicated:
                assert config.drafter_path is not None
                reader = files.enter_context(CheckpointReader(config.drafter_path))
                drafter = DRAFTERS[drafter_config.architecture](
                    drafter_config,
                    tp,
                    reader,
                    target,
                    dtype=dtype,
                    num_positions=config.max_model_len,
                )
                self.bytes_read += reader.bytes_read
                drafter.bind()
                drafter.pack()
                specs += drafter.kv_specs()
        target.pack()
        backend.weights_loaded()
        pools = allocate(specs, config.num_kv_pages, config.block_size)
        num_layers = config.target.decoder.num_layers
        state = SlotState.allocate(config.num_slots, config.num_drafts, config.pages_per_request)
        drafting = None
        if drafter is not None:
            kv = pools[num_layers:]
            drafting = DrafterRank.of(drafter, kv, state.block_table, backend.compile)
        self._model = ModelRank(
            target=target,
            regions=Regions.of(backend.compile),
            target_kv=pools[:num_layers],
            state=state,
            sampling=SamplingState.allocate(
                config.num_slots,
                num_positions=config.max_model_len,
                num_edits=MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + len(config.target.eos_token_ids),
                num_bad_words=MAX_BAD_SEQUENCES,
                bad_word_length=MAX_BAD_WORD_TOKENS,
            ),
            vocab_size=config.target.vocab_size,
            drafter_config=drafter_config,
            drafting=drafting,
        )
        if config.is_dedicated:
            self._remote = RemoteDrafting(self._model, tp)
