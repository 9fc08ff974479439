"""What training computes is what serving computes."""

import random

import pytest
import torch

from models.kv_cache import allocate
from models.proposal import query_blocks
from tests.tiny import Kind, load_target
from tests.unit.models.ranks import load_drafter_rank, load_target_rank
from tests.unit.training.conftest import RunMaker
from training.blocks import Anchored, choose_anchors, make_batch
from training.features import capture
from training.pair import load_pair
from training.pair import load_target as load_training_target

PAGE = 4


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen3"])
def test_block_logits_are_the_served_ones(make_run: RunMaker, kind: Kind) -> None:
    run = make_run(kind=kind)
    training, _ = run.samples()
    target = load_training_target(
        run.target, run.capture_layer_ids, torch.float32, 64, torch.device("cpu")
    )
    pair = load_pair(run.folder.initial, target, 64)
    sequences = []
    for sample in training:
        tokens = sample.token_ids
        anchors = choose_anchors(len(sample.prompt_ids), len(tokens), 6, random.Random(0))
        sequences.append(Anchored(tokens, anchors, capture(target, tokens, 0).aux))
    batch = make_batch(sequences, 5, 299)
    with torch.no_grad():
        states = pair.block_states(batch)
        found = pair.drafter.draft_logits(states, 4)
    row = 0
    for sequence in sequences:
        for anchor in sequence.anchors:
            expected = served_logits(run.target, run.folder.initial, sequence, anchor)
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-4)
            row += 1
    assert row == len(found)


def served_logits(target_dir, drafter_dir, sequence, anchor):  # type: ignore[no-untyped-def]
    """One block through paged KV, as a step of the engine runs it."""
    drafter = load_drafter_rank(drafter_dir, load_target_rank(target_dir))
    num_pages = len(sequence.token_ids) // PAGE + 2
    kv = allocate(drafter.kv_specs(), num_pages=num_pages, page_size=PAGE)
    table = torch.arange(num_pages - 1, 0, -1, dtype=torch.int32)
    positions = torch.arange(anchor, dtype=torch.int32)
    slots = table[positions // PAGE] * PAGE + positions % PAGE
    with torch.no_grad():
        drafter.inject(sequence.aux[:anchor], positions, slots, kv)
        lens = torch.tensor([anchor], dtype=torch.int32)
        context = drafter.ops.block_context(
            table.unsqueeze(0), torch.zeros(1, dtype=torch.int32), lens, 5, PAGE, len(table)
        )
        bonus = torch.tensor([sequence.token_ids[anchor]], dtype=torch.int32)
        hidden = drafter.block_hidden(query_blocks(bonus, 4, 299), lens, context, kv)
        return drafter.draft_logits(hidden, 4)[0]


def test_captured_states_are_transformers(make_run: RunMaker) -> None:
    run = make_run()
    sample = run.samples()[0][0]
    features = run.cache().get(sample.token_ids)
    model = load_target(run.target)
    with torch.no_grad():
        states = model(
            torch.tensor([sample.token_ids[:-1]]), output_hidden_states=True
        ).hidden_states
    # z-lab's id counts outputs of layers, and the tuple begins with the embedding.
    expected = torch.cat([states[i + 1][0] for i in run.recipe.target_layer_ids], dim=-1)
    torch.testing.assert_close(features.aux, expected, rtol=0, atol=1e-4)


def test_every_own_parameter_is_trained_and_nothing_of_the_target(make_run: RunMaker) -> None:
    run = make_run()
    target = load_training_target(
        run.target, run.capture_layer_ids, torch.float32, 64, torch.device("cpu")
    )
    pair = load_pair(run.folder.initial, target, 64)
    trained = pair.trained()
    assert {n.split(".")[0] for n in trained} == {"fc", "hidden_norm", "layers", "norm"}
    tokens = run.samples()[0][0].token_ids
    batch = make_batch([Anchored(tokens, [6, 9], capture(target, tokens, 0).aux)], 5, 299)
    pair.block_states(batch).square().sum().backward()
    assert all(each.parameter.grad is not None for each in trained.values())
    assert all(parameter.grad is None for parameter in target.parameters())
