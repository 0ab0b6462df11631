"""A buffer is filled again when nothing can see it any more, and never before."""
import threading

import pytest
import torch

from pipeline.buffers import Pool, page_lock


def test_a_buffer_is_free_when_the_last_tensor_that_shares_its_memory_is_gone():
    pool = Pool(4096, count=1)
    lease = pool.take()
    place = lease.memory.data_ptr()
    view = lease.memory[64:128].view(torch.float32).view(4, 4)
    del lease
    assert pool.take() is None
    array = view.numpy()
    del view
    assert pool.take() is None
    del array
    assert pool.take().memory.data_ptr() == place


def test_a_graph_that_will_be_walked_backwards_keeps_the_states_it_saved():
    pool = Pool(4096, count=1)
    lease = pool.take()
    states = lease.memory.view(torch.float32).view(32, 32).fill_(2.0)
    weight = torch.ones(32, 32, requires_grad=True)
    loss = (states @ weight).sum()
    del lease, states
    assert pool.take() is None
    loss.backward()
    assert (weight.grad == 64).all()
    del loss
    assert pool.take() is not None


def test_a_buffer_that_is_still_copied_from_waits_for_the_copy():
    pool, copied, late = Pool(64, count=2), threading.Event(), threading.Event()
    for done in (copied, late):
        pool.take().hold(done.is_set)
    assert pool.take() is None
    timer = threading.Timer(0.05, copied.set)
    timer.start()
    lease = pool.take(wait=True)
    assert copied.is_set() and lease is not None and pool.take() is None
    del lease
    assert pool.take() is not None, "a copy that is done holds the buffer's next use as well"
    late.set()
    assert len({pool.take().buffer.index for _ in range(2)}) == 2


def test_a_growing_pool_has_as_many_buffers_as_are_in_use_at_once_and_each_is_locked_once():
    pool, locked = Pool(64), []
    first = pool.take()
    pool.lock_pages(lambda buffer: locked.append(buffer.index))
    del first
    for _ in range(5):
        leases = [pool.take() for _ in range(3)]
        assert len({lease.memory.data_ptr() for lease in leases}) == 3
        del leases
    assert locked == [0, 1, 2] == [buffer.index for buffer in pool.buffers]


def test_memory_outlives_its_pool():
    memory = Pool(64).take().memory
    assert not memory.any() and (memory.fill_(7) == 7).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: pages are locked for it")
def test_a_gpu_copies_locked_pages_by_itself_and_they_are_unlocked_with_the_buffer():
    for _ in range(3):  # the address may come again
        pool = Pool(1 << 20)
        pool.lock_pages(page_lock)
        lease = pool.take()
        assert lease.memory.is_pinned() and (lease.memory.fill_(3).to("cuda", non_blocking=True) == 3).all()
        del lease, pool
