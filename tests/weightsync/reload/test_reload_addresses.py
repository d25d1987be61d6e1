"""Kind A: what a captured graph may hold stays where it is and holds the new value."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import (
    MODES,
    Captured,
    HookedNet,
    Kernel,
    Layer,
    Net,
    cold,
    full,
    param,
    push,
    push_in_chunks,
    state_bytes,
    zeros,
)

from weightsync import LayoutError, reload_state

both_modes = pytest.mark.parametrize("mode", MODES)


def one(hook, **params):
    return Net(l=Layer(hook, **(params or {"w": zeros(4)})))


@both_modes
def test_a_derived_tensor_rebound_by_a_hook_stays_in_place(mode):
    def hook(layer):
        layer.d = layer.w.data * 2

    model = cold(one(hook), {"l.w": full(1, 4)})
    graph = Captured(model)
    push(model, {"l.w": full(5, 4)}, mode)
    graph.check(model)
    assert graph["l.d"].tolist() == [10] * 4
    assert model.l.d.tolist() == [10] * 4


@both_modes
def test_a_rebuilt_kernel_object_keeps_scales_and_strides(mode):
    def hook(layer):
        layer.s_kernel = layer.s.data * 2
        layer.kernel = Kernel(layer.s_kernel, torch.arange(4.0))

    model = cold(one(hook, s=zeros(4)), {"l.s": full(1, 4)})
    graph, first = Captured(model), model.l.kernel
    for value in (3, 4):
        push(model, {"l.s": full(value, 4)}, mode)
        graph.check(model)
        assert model.l.kernel.scale.data_ptr() == model.l.s_kernel.data_ptr() == first.scale.data_ptr()
        assert first.scale.tolist() == [2 * value] * 4
        assert graph["l.kernel.strides"].tolist() == [0, 1, 2, 3]


@both_modes
def test_a_kernel_object_that_aliases_the_parameter_still_does(mode):
    def hook(layer):
        layer.kernel = Kernel(layer.s, layer.s.data[1:])

    model = cold(one(hook, s=zeros(4)), {"l.s": full(1, 4)})
    graph = Captured(model)
    push(model, {"l.s": full(3, 4)}, mode)
    graph.check(model)
    assert model.l.kernel.scale is model.l.s
    assert model.l.kernel.strides.tolist() == [3, 3, 3]


@both_modes
def test_unregistered_workspace_and_index_tensors_keep_their_addresses(mode):
    def hook(layer):
        layer.workspace, layer.sort_idx = zeros(4), layer.g_idx.data.argsort()

    model = cold(one(hook, g_idx=zeros(4)), {"l.g_idx": torch.tensor([3.0, 2, 1, 0])})
    graph = Captured(model)
    push(model, {"l.g_idx": torch.tensor([0.0, 1, 3, 2])}, mode)
    graph.check(model)
    assert graph["l.sort_idx"].tolist() == [0, 1, 3, 2]


@both_modes
def test_assignment_through_data_is_turned_into_a_copy(mode):
    def hook(layer):
        layer.w.data = F.pad(layer.w.data, (0, 2))

    model = cold(one(hook, w=zeros(2, 3)), {"l.w": full(1, 2, 3)})
    graph, parameter = Captured(model), model.l.w
    for value in (2, 3):
        push(model, {"l.w": full(value, 2, 3)}, mode)
        graph.check(model)
        assert model.l.w is parameter
        assert model.l.w.tolist() == [[value] * 3 + [0, 0]] * 2


@both_modes
def test_tensors_in_containers_partials_and_closures_are_updated_in_place(mode):
    def hook(layer):
        derived = layer.w.data * 2
        layer.d = {"k": derived, "deep": [(layer.w.data * 3,)]}
        layer.call = functools.partial(torch.add, layer.w.data * 4)
        layer.closed = lambda x: x + derived

    model = cold(one(hook), {"l.w": full(1, 4)})
    graph, old_call, old_closure = Captured(model), model.l.call, model.l.closed
    push(model, {"l.w": full(5, 4)}, mode)
    graph.check(model)
    assert model.l.d["k"].tolist() == [10] * 4
    assert model.l.d["deep"][0][0].tolist() == [15] * 4
    for call in (model.l.call, old_call):
        assert call(zeros(4)).tolist() == [20] * 4
    for closed in (model.l.closed, old_closure):
        assert closed(zeros(4)).tolist() == [10] * 4


@both_modes
def test_two_tensors_that_a_hook_swaps_are_not_copied_over_each_other(mode):
    def hook(model):
        model.a, model.b = model.l.w.data + 1, model.l.w.data + 2
        model.a, model.b = model.b, model.a

    model = cold(HookedNet(hook, l=Layer(w=zeros(2))), {"l.w": full(1, 2)})
    graph = Captured(model)
    push(model, {"l.w": full(10, 2)}, mode)
    graph.check(model)
    assert (model.a.tolist(), model.b.tolist()) == ([12, 12], [11, 11])


@both_modes
def test_live_tensors_swapped_by_name_exchange_values_not_addresses(mode):
    class Swapping(Net):
        supports_direct_reload = True

        def process_weights_after_loading(self):
            self.a, self.b = self.b, self.a

    model = Swapping()
    model.a, model.b = param(zeros(2)), param(zeros(2))
    cold(model, {"a": full(1, 2), "b": full(2, 2)})
    graph = Captured(model)
    push(model, {"a": full(3, 2), "b": full(4, 2)}, mode)
    graph.check(model)
    assert (model.a.tolist(), model.b.tolist()) == ([4, 4], [3, 3])


@both_modes
def test_a_result_of_another_shape_is_refused_by_path_and_nothing_of_the_layer_changes(mode):
    sizes = [4, 9]

    def hook(layer):
        layer.e = layer.w.data * 2
        layer.d = zeros(sizes.pop(0))

    model = cold(one(hook), {"l.w": full(1, 4)})
    before = state_bytes(model)
    with pytest.raises(LayoutError, match=r"l\.d.*\(4,\).*\(9,\)") as caught:
        push(model, {"l.w": full(5, 4)}, mode)
    assert caught.value.names == ("l.d",)
    assert state_bytes(model) == before
    assert reload_state(model) == "live"


@both_modes
def test_a_result_that_vanishes_is_refused_by_path(mode):
    results = [zeros(4), None]

    def hook(layer):
        layer.d = results.pop(0)

    model = cold(one(hook), {"l.w": full(1, 4)})
    with pytest.raises(LayoutError, match=r"l\.d") as caught:
        push(model, {"l.w": full(5, 4)}, mode)
    assert caught.value.names == ("l.d",)


@both_modes
def test_a_cast_at_copy_back_is_refused(mode):
    dtypes = [torch.float32, torch.float16]

    def hook(layer):
        layer.d = layer.w.data.to(dtypes.pop(0))

    model = cold(one(hook), {"l.w": full(1, 4)})
    with pytest.raises(LayoutError, match=r"float32.*float16"):
        push(model, {"l.w": full(5, 4)}, mode)


@both_modes
def test_host_scalars_are_refreshed_and_reported(mode):
    def hook(layer):
        layer.s = float(layer.w.max())
        layer.is_large = bool(layer.s > 3)

    model = cold(one(hook), {"l.w": full(2, 4)})
    report = push(model, {"l.w": full(5, 4)}, mode)
    assert model.l.s == 5.0
    assert report.host_scalars == {"l.s": (2.0, 5.0), "l.is_large": (False, True)}


@both_modes
def test_a_host_scalar_that_comes_back_to_its_constructed_value_is_not_taken_for_untouched(mode):
    def hook(layer):
        layer.s = 1.0 if layer.w.max() < 3 else 2.0
        layer.flag = bool(layer.w.max() > 3)

    model = one(hook)
    model.l.s, model.l.flag = 1.0, False
    cold(model, {"l.w": full(5, 4)})
    assert (model.l.s, model.l.flag) == (2.0, True)
    push(model, {"l.w": full(1, 4)}, mode)
    assert (model.l.s, model.l.flag) == (1.0, False)


@both_modes
def test_what_an_engine_binds_after_the_first_load_is_left_alone(mode):
    def hook(layer):
        layer.d = layer.w.data * 2

    model = one(hook)
    model.l.kv_cache, model.l.num_steps = torch.tensor([]), 0
    cold(model, {"l.w": full(1, 4)})
    model.l.kv_cache, model.l.num_steps = full(7, 16), 12
    model.l.late = full(8, 3)
    graph, cache = Captured(model), model.l.kv_cache
    push(model, {"l.w": full(5, 4)}, mode)
    graph.check(model)
    assert model.l.kv_cache is cache
    assert (model.l.num_steps, model.l.kv_cache.tolist(), model.l.late.tolist()) == (12, [7] * 16, [8] * 3)


@both_modes
def test_a_tensor_that_moves_behind_our_back_fails_the_audit(mode):
    model = cold(one(None), {"l.w": full(1, 4)})
    model.other = full(1, 3)
    from weightsync import start_reload

    session = start_reload(model, mode=mode)
    session.load_weights({"l.w": full(5, 4)})
    model.other = full(1, 3)
    with pytest.raises(LayoutError, match=r"other: address"):
        session.finish()
    assert reload_state(model) == "torn"


@both_modes
def test_addresses_are_flat_over_many_reloads(mode):
    def hook(layer):
        layer.d = layer.w.data.t().contiguous()

    model = cold(one(hook, w=zeros(2, 3)), {"l.w": full(1, 2, 3)})
    graph = Captured(model)
    for value in range(20):
        push_in_chunks(model, {"l.w": full(value, 2, 3)}, mode)
        graph.check(model)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = param(zeros(1, 4))

    def process_weights_after_loading(self):
        self.w_t = self.w.data.as_strided((4, 1), (1, 7))

    def load_weights(self, weights):
        for _, tensor in weights:
            self.w.data.copy_(tensor)


@both_modes
def test_the_stride_of_a_dim_of_size_one_means_nothing(mode):
    model = cold(Tiny(), {"w": full(1, 1, 4)})
    push(model, {"w": full(2, 1, 4)}, mode)
    assert model.w_t.flatten().tolist() == [2] * 4


@both_modes
def test_a_result_with_other_strides_is_refused(mode):
    results = [lambda w: w.clone(), lambda w: w.t().contiguous().t()]

    def hook(layer):
        layer.d = results.pop(0)(layer.w.data)

    model = cold(one(hook, w=zeros(2, 3)), {"l.w": full(1, 2, 3)})
    with pytest.raises(LayoutError, match=r"l\.d: stride \(3, 1\) became \(1, 2\)"):
        push(model, {"l.w": full(5, 2, 3)}, mode)


@both_modes
def test_a_place_that_comes_up_holds_the_live_tensor_not_the_staged_one(mode):
    def hook(layer):
        if layer.wants_alias:
            layer.alias = layer.w

    model = one(hook)
    model.l.wants_alias = 0
    cold(model, {"l.w": full(1, 4)})
    model.l.wants_alias = 1  # a setting that the engine changed since
    parameter = model.l.w
    assert push(model, {"l.w": full(5, 4)}, mode).added == ["l.alias"]
    assert model.l.alias is parameter


@both_modes
def test_a_container_that_a_hook_fills_in_place_is_kept(mode):
    def hook(layer):
        layer.table["d"] = layer.w.data * 2
        layer.parts.append(layer.w.data * 3)

    model = one(hook)
    model.l.table, model.l.parts = {}, []
    cold(model, {"l.w": full(1, 4)})
    graph = Captured(model)
    for value in (5, 6):
        push(model, {"l.w": full(value, 4)}, mode)
        graph.check(model)
        assert model.l.table["d"].tolist() == [2 * value] * 4
        assert [part.tolist() for part in model.l.parts] == [[3 * value] * 4]


def sleep_and_wake(model):
    """Frees the memory behind each parameter and allocates it elsewhere, as engines do; the tensors stay the same.

    Returns what has to be kept so that nothing comes back to where it was.
    """
    blockers = []
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        before, size = storage.data_ptr(), storage.nbytes()
        while storage.data_ptr() in (before, 0):
            storage.resize_(0)
            blockers.append(torch.zeros(size, dtype=torch.uint8))
            storage.resize_(size)
    return blockers


@both_modes
@pytest.mark.parametrize("has_hook", [False, True])
def test_a_model_that_slept_and_woke_at_other_addresses_is_bound_anew(mode, has_hook):
    size = 1 << 16

    def hook(layer):
        layer.w.data.mul_(2)

    model = cold(one(hook if has_hook else None, w=zeros(size)), {"l.w": full(1, size)})
    factor = 2 if has_hook else 1
    for value in (3, 4):
        push(model, {"l.w": full(value, size)}, mode)
        assert model.l.w.eq(factor * value).all()
    before = model.l.w.data_ptr()
    blockers = sleep_and_wake(model)
    assert model.l.w.data_ptr() != before
    for value in (5, 6):
        push(model, {"l.w": full(value, size)}, mode)
        assert model.l.w.eq(factor * value).all()
    del blockers
