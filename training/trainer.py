"""One worker's part of training: passes, gradients, updates."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from training.blocks import NO_LABEL, Anchored, Batch, draft_weights, labels_of, make_batch
from training.features import FeatureCache, Features
from training.objective import Soft, choose_candidates, score
from training.optimizer import Masters
from training.pair import Pair
from training.progress import Progress, StepReport
from training.recipe import Recipe
from training.samples import Sample
from training.schedule import Item, Step, candidate_seed, frequent_tokens, passes, plan_step

# Sums a list of tensors over the workers, in place.
Reduce = Callable[[list[Tensor]], None]


class Trainer:
    """Trains `pair` on `samples`. With several workers, each computes a part of every step and
    `reduce` sums gradients; all hold the same masters."""

    def __init__(
        self,
        pair: Pair,
        recipe: Recipe,
        samples: Sequence[Sample],
        cache: FeatureCache,
        *,
        rank: int = 0,
        num_workers: int = 1,
        reduce: Reduce | None = None,
    ) -> None:
        self.pair, self.recipe, self.progress = pair, recipe, Progress()
        self._samples, self._cache = samples, cache
        self._rank, self._num_workers = rank, num_workers
        self._reduce = reduce or (lambda tensors: None)
        self._device = pair.target.embed.weight.device
        self._frequent = torch.tensor(
            frequent_tokens(samples, recipe.frequent_tokens), dtype=torch.int64, device=self._device
        )
        self._weights = draft_weights(recipe.num_drafts, recipe.gamma).to(self._device)
        self.masters = Masters(
            pair.trained(),
            optimizer=recipe.optimizer,
            learning_rate=recipe.learning_rate,
            norm_rate=recipe.norm_rate,
            weight_decay=recipe.weight_decay,
        )

    def step(self, num_steps: int) -> StepReport:
        """One step of `num_steps`; `progress` says how many there were before."""
        started = time.perf_counter()
        recipe, progress = self.recipe, self.progress
        plan = plan_step(self._samples, recipe, progress)
        total = self._total_weight(plan)
        # loss, right drafts, labels, block positions; of all passes.
        sizes = (1, recipe.num_drafts, recipe.num_drafts, 1)
        sums = [torch.zeros(n, dtype=torch.float64, device=self._device) for n in sizes]
        mine = plan.items[self._rank :: self._num_workers]
        for number, items in enumerate(passes(mine, recipe.block_size, recipe.pass_positions)):
            self._pass(
                items, candidate_seed(recipe, progress.step, self._rank, number), total, sums
            )
        self._reduce([*self.masters.gradients.values(), *sums])
        self.masters.update(recipe.rate_at(progress.step, num_steps))
        loss, right, labels, positions = sums
        seconds = time.perf_counter() - started
        self.progress = replace(
            progress,
            step=progress.step + 1,
            epoch=plan.epoch,
            index=plan.index,
            num_positions=progress.num_positions + int(positions),
            elapsed_s=progress.elapsed_s + seconds,
        )
        shares = tuple((right / labels.clamp(min=1)).tolist())
        return StepReport(float(loss), shares, int(positions), seconds)

    def _pass(self, items: Sequence[Item], seed: int, total: float, sums: list[Tensor]) -> None:
        """Forward and backward over a few sequences."""
        recipe, pair = self.recipe, self.pair
        features = [self._cache.get(item.sample.token_ids) for item in items]
        anchored = [
            Anchored(item.sample.token_ids, item.anchors, each.aux)
            for item, each in zip(items, features, strict=True)
        ]
        batch = make_batch(anchored, recipe.block_size, pair.config.mask_token_id, self._device)
        known = batch.labels != NO_LABEL
        labels = batch.labels[known]
        weights = (self._weights / total).expand(known.shape)[known]
        soft = self._soft(items, features, batch, known) if recipe.distill else None
        certain = torch.cat([labels, self._frequent])
        if soft is not None:
            certain = torch.cat([certain, soft.ids.flatten()])
        head = pair.drafter.lm_head.weight
        generator = torch.Generator().manual_seed(seed)
        candidates = choose_candidates(certain, len(head), recipe.random_tokens, generator)
        states = pair.block_states(batch)[:, 1:][known]
        scored = score(states, labels, weights, head, candidates, soft, recipe.distill)
        scored.loss.backward()
        self.masters.collect()
        right = torch.zeros(known.shape, dtype=torch.bool, device=self._device)
        right[known] = scored.best == labels
        sums[0] += scored.loss.detach()
        sums[1] += right.sum(0)
        sums[2] += known.sum(0)
        sums[3] += batch.num_positions

    def _soft(
        self, items: Sequence[Item], features: Sequence[Features], batch: Batch, known: Tensor
    ) -> Soft:
        """What the target expects where each label stands."""
        ids, probs = [], []
        for item, each in zip(items, features, strict=True):
            # Row i of the features is about position i + 1; draft j stands at anchor + j.
            rows = torch.tensor(item.anchors).unsqueeze(1) + torch.arange(self.recipe.num_drafts)
            rows = rows.clamp(max=len(each.aux) - 1)
            ids.append(each.top_ids[rows])
            probs.append(each.top_probs[rows])
        return Soft(
            torch.cat(ids).to(self._device)[known].long(), torch.cat(probs).to(self._device)[known]
        )

    def _total_weight(self, plan: Step) -> float:
        """The sum of weights over all labels of a step, on all workers."""
        counts = sum(
            (labels_of(i.sample.token_ids, i.anchors, self.recipe.num_drafts) != NO_LABEL).sum(0)
            for i in plan.items
        )
        return float((counts * self._weights.cpu()).sum())
