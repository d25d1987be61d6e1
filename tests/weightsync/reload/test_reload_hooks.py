"""Kind B: derived state is recomputed once per reload, after all of its inputs, in the loader's order."""

import pytest
import torch
from torch import nn
from toys import (
    MODES,
    Captured,
    HookedNet,
    LatentAttention,
    Layer,
    LazySink,
    Net,
    QuantMethod,
    Wrapper,
    cold,
    full,
    param,
    push,
    push_in_chunks,
    zeros,
)

from weightsync import LayoutError, ReloadError, record_layouts, reload_state, start_reload

both_modes = pytest.mark.parametrize("mode", MODES)


@both_modes
def test_a_derived_cache_follows_a_push(mode):
    def hook(layer):
        layer.cache = layer.w.data.t().float()

    model = cold(Net(l=Layer(hook, w=zeros(2, 3))), {"l.w": full(1, 2, 3)})
    graph = Captured(model)
    push(model, {"l.w": full(5, 2, 3)}, mode)
    assert graph["l.cache"].tolist() == [[5, 5]] * 3


@both_modes
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_level_hook_runs(mode, in_place):
    def hook(model):
        if in_place:
            model.neg.copy_(-model.l.w.data)
        else:
            model.neg = -model.l.w.data

    model = HookedNet(hook, l=Layer(w=zeros(2)))
    model.register_buffer("neg", zeros(2), persistent=False)
    cold(model, {"l.w": full(1, 2)})
    graph = Captured(model)
    report = push(model, {"l.w": full(10, 2)}, mode)
    graph.check(model)
    assert graph["neg"].tolist() == [-10, -10]
    assert report.hooks == ["HookedNet.process_weights_after_loading"]


class HookInLoad(Net):
    """Calls its own hook at the end of each load_weights."""

    def __init__(self):
        super().__init__(l=Layer(a=zeros(2), b=zeros(2)))
        self.seen = []

    def load_weights(self, weights):
        super().load_weights(weights)
        self.process_weights_after_loading()

    def process_weights_after_loading(self):
        self.seen.append((float(self.l.a.sum()), float(self.l.b.sum())))


@both_modes
def test_a_hook_called_inside_load_weights_runs_once_after_the_last_chunk(mode):
    model = cold(HookInLoad(), {"l.a": full(1, 2), "l.b": full(1, 2)})
    model.seen.clear()
    push_in_chunks(model, {"l.a": full(2, 2), "l.b": full(3, 2)}, mode)
    assert model.seen == [(4.0, 6.0)]


@both_modes
def test_a_hook_called_inside_a_loader_that_is_really_run_does_not_run_early(mode):
    class Computing(HookInLoad):
        def load_weights(self, weights):
            super().load_weights((name, tensor * 2) for name, tensor in weights)

    model = cold(Computing(), {"l.a": full(1, 2), "l.b": full(1, 2)})
    model.seen.clear()
    report = push_in_chunks(model, {"l.a": full(2, 2), "l.b": full(3, 2)}, mode)
    assert set(report.interpreted) == {"l.a", "l.b"}
    assert model.seen == [(8.0, 12.0)]


@both_modes
def test_a_hook_that_a_container_gets_later_stages_its_children_together(mode):
    model = Net(block=Net(a=Layer(w=zeros(2)), b=Layer(w=zeros(2))))
    model.block.register_buffer("fused", zeros(4))
    cold(model, {"block.a.w": zeros(2), "block.b.w": zeros(2)})
    push(model, {"block.a.w": full(1, 2), "block.b.w": full(1, 2)}, mode)

    def fuse(block):
        block.fused.copy_(torch.cat([block.a.w.data, block.b.w.data]))

    model.block.quant_method = QuantMethod(fuse)
    graph = Captured(model)
    push(model, {"block.a.w": full(2, 2), "block.b.w": full(3, 2)}, mode)
    graph.check(model)
    assert graph["block.fused"].tolist() == [2, 2, 3, 3]


@both_modes
def test_a_cache_built_lazily_by_forward_is_refreshed_at_its_address(mode):
    model = cold(Net(l=LazySink()), {"l.sink": full(1, 2)})
    assert model.l().tolist() == [1, 1, 0]
    pointer, graph = model.l._c.data_ptr(), Captured(model)
    for value in (5, 6):
        report = push(model, {"l.sink": full(value, 2)}, mode)
        assert report.rebuilt_on_forward == ["l._c"]
        assert model.l().tolist() == [value, value, 0]
        assert model.l._c.data_ptr() == pointer
        assert graph["l._c"].tolist() == [value, value, 0]
    graph.check(model)


class Refreshing(LazySink):
    def refresh_derived(self):
        if self._c is not None:
            self._c = torch.nn.functional.pad(self.sink.data, (0, 1))


@both_modes
def test_refresh_derived_updates_a_lazy_cache_at_finish(mode):
    model = cold(Net(l=Refreshing()), {"l.sink": full(1, 2)})
    model.l()
    graph = Captured(model)
    report = push(model, {"l.sink": full(5, 2)}, mode)
    graph.check(model)
    assert report.rebuilt_on_forward == []
    assert graph["l._c"].tolist() == [5, 5, 0]


@both_modes
def test_a_bare_copy_behind_the_loaders_back_lands(mode):
    class Bare(Net):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    model = cold(Bare(l=Layer(sink=zeros(2)), m=Layer(sink=zeros(2), w=zeros(2))), {n: full(1, 2) for n in NAMES})
    push(model, {name: full(9, 2) for name in NAMES}, mode)
    assert model.l.sink.tolist() == model.m.sink.tolist() == model.m.w.tolist() == [9, 9]


NAMES = ("l.sink", "m.sink", "m.w")


@both_modes
@pytest.mark.parametrize("leave", [None, "delete"])
def test_a_source_that_the_hook_freed_is_back_for_the_session(mode, leave):
    def hook(layer):
        layer.w_uk = layer.kv_b.data.t().contiguous()
        if leave is None:
            layer.kv_b = None
        else:
            del layer.kv_b

    model = cold(Net(l=Layer(hook, kv_b=zeros(2, 3))), {"l.kv_b": full(1, 2, 3)})
    graph = Captured(model)
    for value in (2, 3):
        push(model, {"l.kv_b": full(value, 2, 3)}, mode)
        graph.check(model)
        assert graph["l.w_uk"].tolist() == [[value] * 2] * 3
        assert getattr(model.l, "kv_b", None) is None


@both_modes
@pytest.mark.parametrize("forwards", [False, True])
def test_the_hook_of_a_wrapped_language_model_runs_once(mode, forwards):
    def hook(model):
        model.runs.append(float(model.l.w.sum()))
        model.neg = -model.l.w.data

    class Forwarding(Wrapper):
        def process_weights_after_loading(self):
            self.lm.process_weights_after_loading()

    lm = HookedNet(hook, l=Layer(w=zeros(2)))
    lm.runs = []
    model = (Forwarding if forwards else Wrapper)(lm)
    weights = {"vision.w": full(1, 2), "language_model.l.w": full(1, 2)}
    cold(model, weights)
    lm.runs.clear()
    graph = Captured(model)
    push(model, {"vision.w": full(2, 2), "language_model.l.w": full(3, 2)}, mode)
    graph.check(model)
    assert lm.runs == [6.0]
    assert graph["lm.neg"].tolist() == [-3, -3]
    assert model.vision.w.tolist() == [2, 2]


@both_modes
def test_host_copies_of_scales_follow_the_device_ones(mode):
    def hook(layer):
        layer.s_float = float(layer.s)
        layer.s_host = layer.s.data.clone()

    model = cold(Net(l=Layer(hook, s=zeros(1))), {"l.s": full(1, 1)})
    graph = Captured(model)
    push(model, {"l.s": full(5, 1)}, mode)
    graph.check(model)
    assert (model.l.s_float, model.l.s_host.tolist()) == (5.0, [5.0])


@both_modes
def test_hooks_run_in_the_loaders_order_module_attention_model(mode):
    order = []

    def process(layer):
        order.append("module")
        layer.processed = layer.w.data + 1

    kv_b = Layer(process, w=zeros(2))
    attention = LatentAttention(kv_b)
    model = HookedNet(lambda m: (order.append("model"), setattr(m, "total", m.attn.w_uk + 1)), attn=attention)
    model.dtype = torch.bfloat16
    cold(model, {"attn.kv_b.w": full(1, 2)})
    order.clear()
    graph = Captured(model)
    report = push(model, {"attn.kv_b.w": full(4, 2)}, mode)
    graph.check(model)
    assert order == ["module", "model"]
    assert [hook.split(".")[0] for hook in report.hooks] == ["attn", "attn", "HookedNet"]
    assert attention.seen_dtype is torch.bfloat16
    assert graph["attn.w_uk"].tolist() == [10, 10]
    assert graph["total"].tolist() == [11, 11]


@both_modes
def test_a_hook_over_child_modules_sees_them_raw_as_at_the_first_load(mode):
    def child_hook(layer):
        layer.w.data.mul_(2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(child_hook, w=zeros(2)), Layer(child_hook, w=zeros(2))

        def process_weights_after_loading(self):
            self.fused = torch.cat([self.a.w.data, self.b.w.data])

    model = Net(block=Block(), tail=Layer(child_hook, w=zeros(2)))
    weights = {"block.a.w": full(1, 2), "block.b.w": full(2, 2), "tail.w": full(3, 2)}
    cold(model, weights)
    graph = Captured(model)
    first = graph.replay()
    for _ in range(3):
        push_in_chunks(model, weights, mode)
        graph.check(model)
        assert graph.replay() == first
    assert model.block.fused.tolist() == [1, 1, 2, 2]


@both_modes
def test_a_model_hook_that_transforms_its_children_is_idempotent_over_pushes(mode):
    def hook(model):
        model.l.w.data = model.l.w.data.t().contiguous()
        model.m.w.data.neg_()

    model = HookedNet(hook, l=Layer(w=zeros(2, 3)), m=Layer(w=zeros(2)))
    weights = {"l.w": full(4, 2, 3), "m.w": full(3, 2)}
    cold(model, weights)
    graph = Captured(model)
    first = graph.replay()
    for _ in range(3):
        push(model, weights, mode)
        graph.check(model)
        assert graph.replay() == first


@both_modes
def test_a_hook_that_raises_names_itself_and_leaves_its_layer_as_it_was(mode):
    bad = []

    def hook(layer):
        layer.d = layer.w.data * 2
        if bad:
            raise ArithmeticError("no such scale")

    model = cold(Net(l=Layer(hook, w=zeros(2))), {"l.w": full(1, 2)})
    graph = Captured(model)
    before = graph.replay()
    bad.append(1)
    with pytest.raises(ArithmeticError, match="no such scale") as caught:
        push(model, {"l.w": full(5, 2)}, mode)
    assert "l.quant_method.process_weights_after_loading" in caught.value.__notes__[0]
    graph.check(model)
    assert graph.replay() == before
    assert reload_state(model) == "live"
    bad.clear()
    push(model, {"l.w": full(5, 2)}, mode)
    assert graph["l.d"].tolist() == [10, 10]


@both_modes
def test_hooks_that_only_the_models_own_code_can_call_are_reported_when_nothing_calls_them(mode):
    class Odd(Layer):
        def process_weights_after_loading(self, layer, config):
            raise AssertionError("nobody has these arguments")

    model = cold(Net(l=Odd(w=zeros(2))), {"l.w": full(1, 2)})
    report = push(model, {"l.w": full(2, 2)}, mode)
    assert report.uncalled_hooks == ["l.process_weights_after_loading"]


@both_modes
def test_hooks_are_themselves_again_after_a_session(mode):
    model = cold(Net(l=Layer(lambda layer: None, w=zeros(2))), {"l.w": full(1, 2)})
    hooked = cold(HookedNet(lambda model: None, l=Layer(w=zeros(2))), {"l.w": full(1, 2)})
    for net in (model, hooked):
        push(net, {"l.w": full(2, 2)}, mode)
        session = start_reload(net, mode=mode)
        session.abort("changed my mind")
    assert "process_weights_after_loading" not in vars(hooked)
    assert "process_weights_after_loading" not in vars(model.l.quant_method)


def test_a_module_with_a_hook_and_no_record_is_refused_with_the_remedy():
    model = Net(l=Layer(lambda layer: layer.w.data.mul_(2), w=zeros(2)))
    with pytest.raises(LayoutError, match="record_layouts") as caught:
        start_reload(model, mode="direct")
    assert caught.value.names == ("l",)
    assert reload_state(model) == "live"


class Latching(Net):
    def process_weights_after_loading(self):
        if self._done:
            return
        self._done = True
        self.neg = -self.l.w.data


class LatchingByPresence(Net):
    def process_weights_after_loading(self):
        if getattr(self, "neg", None) is None:
            self.neg = -self.l.w.data


@both_modes
@pytest.mark.parametrize("cls", [Latching, LatchingByPresence])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_latch_is_reset_if_it_was_recorded_and_refused_if_not(mode, cls, recorded):
    model = cls(l=Layer(w=zeros(2)))
    model._done = False
    if recorded:
        record_layouts(model)
    model.load_weights({"l.w": full(1, 2)}.items())
    model.process_weights_after_loading()
    if recorded:
        graph = Captured(model)
        push(model, {"l.w": full(5, 2)}, mode)
        graph.check(model)
        assert graph["neg"].tolist() == [-5, -5]
    else:
        with pytest.raises(LayoutError, match="record_layouts"):
            start_reload(model, mode=mode)
        assert (reload_state(model), model.l.w.tolist()) == ("live", [1, 1])


class Counting(Net):
    calls = 0

    def process_weights_after_loading(self):
        self.calls += 1
        self.neg = -self.l.w.data


@both_modes
def test_a_model_hook_without_a_latch_needs_no_record(mode):
    model = Counting(l=Layer(w=zeros(2)))
    model.load_weights({"l.w": full(1, 2)}.items())
    model.process_weights_after_loading()
    graph = Captured(model)
    push(model, {"l.w": full(5, 2)}, mode)
    graph.check(model)
    assert (graph["neg"].tolist(), model.calls) == ([-5, -5], 2)


@both_modes
def test_a_buffer_that_a_hook_reads_keeps_its_live_value(mode):
    def hook(layer):
        layer.scaled = layer.w.data * layer.factor

    model = Net(l=Layer(hook, w=zeros(2)))
    model.l.register_buffer("factor", full(1, 1))
    cold(model, {"l.w": full(1, 2), "l.factor": full(3, 1)})
    push(model, {"l.w": full(2, 2)}, mode)
    assert model.l.scaled.tolist() == [6, 6]


@both_modes
def test_a_derived_parameter_counts_no_elements_and_is_refreshed(mode):
    def hook(layer):
        layer.derived.data.copy_(layer.w.data * 3)

    layer = Layer(hook, w=zeros(2), derived=param(zeros(2), weight_loader_numel=0))
    model = cold(Net(l=layer), {"l.w": full(1, 2)})
    graph = Captured(model)
    push(model, {"l.w": full(2, 2)}, mode)
    graph.check(model)
    assert graph["l.derived"].tolist() == [6, 6]


@both_modes
def test_a_draft_and_its_target_are_reloaded_apart_though_they_share_an_embedding(mode):
    embed = Layer(w=zeros(2))
    target, draft = Net(embed=embed, l=Layer(w=zeros(2))), Net(embed=embed, head=Layer(w=zeros(2)))
    cold(target, {"embed.w": full(1, 2), "l.w": full(1, 2)})
    cold(draft, {"embed.w": full(1, 2), "head.w": full(1, 2)})
    push(target, {"embed.w": full(5, 2), "l.w": full(5, 2)}, mode, version=3)
    assert draft.head.w.tolist() == [1, 1]
    push(draft, {"head.w": full(7, 2)}, mode, scope="partial")
    assert (draft.embed.w.tolist(), draft.head.w.tolist()) == ([5, 5], [7, 7])


def test_a_session_on_the_target_does_not_touch_a_frozen_draft():
    runs = []
    draft = HookedNet(lambda model: runs.append(1), l=Layer(w=zeros(2)))
    target = Net(l=Layer(w=zeros(2)))
    cold(draft, {"l.w": full(1, 2)})
    cold(target, {"l.w": full(1, 2)})
    runs.clear()
    push(target, {"l.w": full(2, 2)}, "direct")
    assert runs == []
    with pytest.raises(ReloadError, match="open"):
        start_reload(target) and start_reload(target)
    assert reload_state(draft) == "live"


@both_modes
def test_counts_and_logs_that_a_hook_keeps_go_on_as_nothing_depends_on_them(mode):
    def hook(layer):
        layer.num_runs += 1
        layer.log.append(float(layer.w.data[0]))

    model = Net(l=Layer(hook, w=zeros(2)))
    model.l.num_runs, model.l.log = 0, []
    cold(model, {"l.w": full(1, 2)})
    for value in (2, 3):
        push(model, {"l.w": full(value, 2)}, mode)
    assert (model.l.num_runs, model.l.log) == (3, [1.0, 2.0, 3.0])
