"""One rank of a dedicated drafter: its own process and device, beside those of the target."""

from contextlib import ExitStack
from functools import partial

import torch

from actors.buckets import BucketLadder
from actors.config import EngineConfig
from actors.messages import Bucket, StepPlan, decode_plan
from actors.rank import Rank
from actors.shard_inputs import write_page_updates
from models.backends.backend import Rendezvous
from models.drafting import DrafterRank, DraftInputs
from models.exchange import Exchange, ExchangeShape, join_exchange, open_store
from models.kv_cache import allocate
from models.registry import DRAFTERS
from models.target import Vocabulary
from models.weights import CheckpointReader


class DrafterShard(Rank):
    """Takes part in every step that the target verifies: injects it and proposes from it."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        super().__init__(config, rank, place=config.tensor_parallel_size + rank)
        self._drafting: DrafterRank | None = None
        self._exchange: Exchange | None = None
        self._deferred: torch.Tensor | None = None  # drafts that the target has not got yet

    def warm_up(self) -> None:
        """Run every kind of step on padding, alone, so that everything is compiled."""
        for bucket in BucketLadder.for_config(self._config).warm_up():
            self._backend.submit(partial(self._draft_padding, bucket)).result()
        self._backend.seal()

    def open_exchange(self, host: str) -> str:
        """Where all ranks are to meet: the `host:port` of a new store in this process."""
        self._store = open_store(host)
        return f"{host}:{self._store.port}"

    def join_exchange(self, store: str, host: str) -> None:
        """Meet the target's ranks at the `host:port` of the store; `host` is the address of this
        rank's machine that they reach. Raises `RuntimeError` where they don't come."""
        config = self._config
        # The target's ranks come once they have computed, or compiled, for as long as they may.
        timeout_s = config.exchange_timeout_s + max(config.step_timeout_s, config.warm_up_timeout_s)

        def join() -> None:
            self._exchange = join_exchange(
                store,
                host,
                config.tensor_parallel_size + self._rank,
                config.tensor_parallel_size,
                config.drafter_parallel_size,
                timeout_s,
            )

        self._backend.submit(join).result()

    def step(self, payload: bytes) -> bytes:
        """Do the drafter's half of the plan in `payload`. Returns nothing, once it is done.

        Raises `RuntimeError` where another rank is lost.
        """
        plan = decode_plan(payload)
        if plan.bucket is not None:
            try:
                self._backend.submit(lambda: self._run(plan)).result()
            except Exception:
                # This process lives on, so that nothing else would tell the other ranks.
                if self._exchange is not None:
                    self._exchange.leave()
                raise
        return b""

    def _run(self, plan: StepPlan) -> None:
        assert self._drafting is not None
        assert self._exchange is not None, "join_targets() first"
        assert plan.bucket is not None
        bucket, drafting = plan.bucket, self._drafting
        write_page_updates(plan, drafting.block_table)
        inputs = self._exchange.receive(self._shape(bucket))
        if self._deferred is not None:
            self._exchange.send_back(self._deferred)
            self._deferred = None
        proposed = drafting.draft(inputs, bucket.num_drafts, bucket.context_pages)
        if proposed is None:
            return
        logits, drafts = proposed
        if plan.defers_drafts:
            self._deferred = drafts
        else:
            self._exchange.send_back(drafts)
        if self._config.debug_logits_dir is not None:
            self._save(f"step{plan.step:06d}-drafter{self._rank}", {"draft_logits": logits})

    def _draft_padding(self, bucket: Bucket) -> None:
        assert self._drafting is not None
        shape = self._shape(bucket)
        zeros = torch.zeros(shape.num_ints, dtype=torch.int32)
        aux = torch.zeros(shape.num_tokens, shape.width, dtype=shape.dtype)
        self._drafting.draft(
            DraftInputs.unpack(aux, zeros, shape.emitting_rows),
            bucket.num_drafts,
            bucket.context_pages,
        )

    def _shape(self, bucket: Bucket) -> ExchangeShape:
        drafter = self._config.drafter
        assert drafter is not None
        return ExchangeShape(
            num_tokens=bucket.num_tokens,
            width=len(drafter.capture_layer_ids) * drafter.target_hidden_size,
            emitting_rows=bucket.emitting_rows,
            block=drafter.block_size,
            num_drafts=bucket.num_drafts,
            dtype=getattr(torch, self._config.dtype),
        )

    def _load(self, rendezvous: Rendezvous | None) -> None:
        config, backend = self._config, self._backend
        assert config.drafter is not None
        assert config.drafter_path is not None
        tp = backend.init_rank(self._rank, config.drafter_parallel_size, rendezvous)
        dtype = getattr(torch, config.dtype)
        with ExitStack() as files:
            reader = files.enter_context(CheckpointReader(config.target_path))
            vocabulary = Vocabulary(config.target, tp, reader, dtype=dtype, ops=backend.ops)
            reader = files.enter_context(CheckpointReader(config.drafter_path))
            drafter = DRAFTERS[config.drafter.architecture](
                config.drafter,
                tp,
                reader,
                vocabulary,
                dtype=dtype,
                num_positions=config.max_model_len,
            )
        drafter.bind()
        drafter.pack()
        vocabulary.pack()
        backend.weights_loaded()
        kv = allocate(drafter.kv_specs(), config.num_kv_pages, config.block_size)
        # The last row is for padding.
        table = torch.zeros(config.num_slots + 1, config.pages_per_request, dtype=torch.int32)
        self._drafting = DrafterRank.of(drafter, kv, table, backend.compile)
