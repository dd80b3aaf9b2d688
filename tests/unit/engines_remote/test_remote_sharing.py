import torch

from sparring.backend.engines.remote.sharing import over_same_memory


def test_tensors_are_the_same_memory_on_storages_of_their_own():
    buffer = torch.zeros(1000, dtype=torch.uint8)
    views = [
        ("a", buffer[:80].view(torch.bfloat16).view(5, 8)),
        ("b", buffer[256:656].view(torch.float32).view(10, 10).t()),
    ]
    (_, a), (_, b) = twins = over_same_memory(views)
    assert [(name, twin.shape, twin.stride(), twin.dtype) for name, twin in twins] == [
        (name, view.shape, view.stride(), view.dtype) for name, view in views
    ]
    a.fill_(2)
    b[3, 4] = 5
    assert views[0][1].eq(2).all()
    assert views[1][1][3, 4] == 5
    handles = {tensor.untyped_storage()._cdata for tensor in (a, b)}
    assert len(handles) == 1
    assert buffer.untyped_storage()._cdata not in handles
    del buffer, views
    assert b[3, 4] == 5, "they keep the memory alive"
