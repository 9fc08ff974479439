"""The device thread: order, errors, gradients, and that submitting does not wait."""

import threading
import time

import pytest
import torch

from models.backends.eager import EagerBackend


def test_work_runs_in_order_on_one_other_thread() -> None:
    backend = EagerBackend(num_threads=1)
    done: list[int] = []
    threads: set[int] = set()

    def work(i: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.002 * (5 - i))
        done.append(i)
        return i

    futures = [backend.submit(lambda i=i: work(i)) for i in range(5)]
    assert [future.result() for future in futures] == done == list(range(5))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    backend.close()


def test_backends_with_equally_many_threads_share_one_device() -> None:
    first, second, other = (EagerBackend(num_threads=n) for n in (1, 1, 2))
    threads = [b.submit(threading.get_ident).result() for b in (first, second, other)]
    assert threads[0] == threads[1] != threads[2]
    done: list[str] = []
    second.submit(lambda: time.sleep(0.05))
    first.submit(lambda: done.append("first"))
    first.close()
    first.close()
    assert done == ["first"], "closing one waits for what it submitted"
    with pytest.raises(RuntimeError):
        first.submit(lambda: 1)
    assert second.submit(threading.get_ident).result() == threads[1]
    second.close()
    other.close()


def test_submit_does_not_wait() -> None:
    backend = EagerBackend(num_threads=1)
    release = threading.Event()
    future = backend.submit(release.wait)
    assert not future.done()
    release.set()
    assert future.result(timeout=5)
    backend.close()


def test_an_error_reaches_whoever_reads_the_result_and_spares_the_next() -> None:
    backend = EagerBackend(num_threads=1)
    failed = backend.submit(lambda: 1 / 0)
    after = backend.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert after.result() == 7
    backend.close()


def test_work_has_its_threads_and_no_gradients() -> None:
    backend = EagerBackend(num_threads=1)
    weight = torch.ones(2, requires_grad=True)
    assert backend.submit(torch.get_num_threads).result() == 1
    assert backend.submit(torch.is_inference_mode_enabled).result()
    assert not backend.submit(lambda: (weight * 2).requires_grad).result()
    assert not torch.is_inference_mode_enabled()
    backend.close()


def test_close_finishes_what_was_submitted() -> None:
    backend = EagerBackend(num_threads=1)
    future = backend.submit(lambda: time.sleep(0.05) or 3)
    backend.close()
    assert future.done()
    assert future.result() == 3
    with pytest.raises(RuntimeError):
        backend.submit(lambda: 1)
