"""Pools: what is written at a slot is what is read at its page and offset."""

import torch

from models.kv_cache import KVSpec, allocate


def test_pools_start_at_zero_in_the_order_of_their_layers() -> None:
    specs = [KVSpec(2, 4, torch.float32), KVSpec(1, 8, torch.bfloat16)]
    first, second = allocate(specs, num_pages=5, page_size=3)
    assert first.k.shape == first.v.shape == (5, 3, 2, 4)
    assert second.k.shape == second.v.shape == (5, 3, 1, 8)
    assert (first.k.dtype, second.v.dtype) == (torch.float32, torch.bfloat16)
    assert first.page_size == second.page_size == 3
    for pool in (first, second):
        assert not pool.k.any()
        assert not pool.v.any()
    first.k.fill_(1)
    assert not first.v.any(), "K and V have memory of their own"


def test_write_and_gather_equal_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    num_pages, page_size = 6, 3
    (pool,) = allocate([KVSpec(2, 4, torch.float32)], num_pages, page_size)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:11].to(torch.int32)
    k, v = torch.randn(2, 11, 2, 4, generator=generator)
    pool.write(slots, k, v)

    written = dict(zip(slots.tolist(), zip(k, v, strict=True), strict=True))
    zeros = torch.zeros(2, 4)
    table = torch.tensor([[5, 1], [0, 3], [2, 2]], dtype=torch.int32)
    found_k, found_v = pool.gather(table)
    assert found_k.shape == found_v.shape == (3, 2 * page_size, 2, 4)
    for row, pages in enumerate(table.tolist()):
        for position in range(2 * page_size):
            slot = pages[position // page_size] * page_size + position % page_size
            expected_k, expected_v = written.get(slot, (zeros, zeros))
            assert torch.equal(found_k[row, position], expected_k)
            assert torch.equal(found_v[row, position], expected_v)

    pool.write(slots[:1], -k[:1], -v[:1])
    table = slots[:1].view(1, 1) // page_size
    again_k, again_v = pool.gather(table)
    assert torch.equal(again_k[0, slots[0] % page_size], -k[0])
    assert torch.equal(again_v[0, slots[0] % page_size], -v[0])
