"""What a hook did is seen through any view, and assignments are seen even when the value is the same."""

import torch
from toys import Kernel, Layer, full, zeros

from weightsync.reload.hooks.observe import TensorLog, assignments, index_of


def observe(action, **tensors):
    told = []
    log = TensorLog(index_of(tensors), {}, lambda path, tensor: told.append((path, tensor.tolist())))
    with log:
        action()
    return log, told


def test_writes_through_views_data_and_detach_are_seen_with_the_old_bytes():
    a, b = torch.arange(4.0), torch.arange(3.0)
    log, told = observe(lambda: (a.view(2, 2)[1].mul_(2), b.detach().fill_(9), a.add_(1)), a=a, b=b)
    assert log.written_live == {"a", "b"}
    assert told == [("a", [0, 1, 2, 3]), ("b", [0, 1, 2])]


def test_a_write_to_the_other_half_of_a_storage_is_not_seen():
    base = torch.zeros(8)
    log, _ = observe(lambda: base[4:].fill_(1), first=base[:4])
    assert not log.written_live


def test_overwriting_is_told_from_processing():
    a, b, c, d = (full(1, 3) for _ in range(4))

    def action():
        a.copy_(zeros(3))
        b.mul_(2)
        doubled = c * 2
        c.copy_(doubled)
        torch.add(zeros(3), 1, out=d)

    log, _ = observe(action, a=a, b=b, c=c, d=d)
    assert log.written_live == {"a", "b", "c", "d"}
    assert log.read_then_written == {"b", "c"}


def test_views_alone_are_neither_read_nor_written():
    a = full(1, 4)
    log, _ = observe(lambda: (a.t(), a.view(2, 2), a[1:], a.detach()), a=a)
    assert not log.read
    assert not log.written_live


def test_writes_in_lists_and_out_arguments_are_seen():
    a, b = zeros(2), zeros(2)
    log, _ = observe(lambda: torch._foreach_copy_([a], [full(1, 2)]), a=a, b=b)
    assert log.written_live == {"a"}


def test_assignments_are_noted_and_the_class_comes_back():
    layer, kernel = Layer(w=zeros(2)), Kernel(zeros(1), zeros(1))
    layer.flag, layer.other = True, 1
    with assignments([layer, kernel, layer, object()]) as assigned:
        assert isinstance(layer, Layer)
        layer.flag = True
        kernel.scale = kernel.scale
    assert assigned[id(layer)] == {"flag"}
    assert assigned[id(kernel)] == {"scale"}
    assert (type(layer), type(kernel)) == (Layer, Kernel)
