"""Kind L: a reload commits, or the model serves the old bytes, or it refuses to serve and says so."""

import gc
import threading
import weakref

import pytest
import torch
from toys import (
    MODES,
    Captured,
    HookedNet,
    Layer,
    MoENet,
    Net,
    codes,
    cold,
    full,
    push,
    push_in_chunks,
    state_bytes,
    zeros,
)

from weightsync import (
    CoverageError,
    LayoutError,
    Manifest,
    ReloadError,
    TornModelError,
    abort_reload,
    finish_reload,
    live_version,
    reload,
    reload_state,
    start_reload,
)

both_modes = pytest.mark.parametrize("mode", MODES)
ROLLBACKS = ("none", "host", "device")


class Serving(Net):
    """A model with a forward."""

    def forward(self):
        return sum(parameter.sum() for parameter in self.parameters())


def build(hook=None):
    return Serving(l0=Layer(hook, a=zeros(2), b=zeros(2)), l1=Layer(hook, a=zeros(2), b=zeros(2)))


def weights(value):
    return {f"l{i}.{name}": full(value, 2) for i in range(2) for name in "ab"}


def double(layer):
    layer.sum = layer.a.data + layer.b.data


@both_modes
@pytest.mark.parametrize("hook", [None, double])
@pytest.mark.parametrize("sent", range(4))
def test_a_retry_after_an_abort_behaves_like_a_first_try(mode, hook, sent):
    model = cold(build(hook), weights(1))
    graph = Captured(model)
    session = start_reload(model, mode=mode, rollback="host")
    session.load_weights(list(weights(30).items())[:sent])
    assert session.abort("trainer died") == "live"
    graph.check(model)
    assert state_bytes(model) == state_bytes(cold(build(hook), weights(1)))
    push_in_chunks(model, weights(30), mode)
    graph.check(model)
    assert state_bytes(model) == state_bytes(cold(build(hook), weights(30)))


@both_modes
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_an_abort_brings_the_old_bytes_back_or_tears_the_model(mode, rollback):
    model = cold(build(), weights(1))
    before = state_bytes(model)
    session = start_reload(model, mode=mode, rollback=rollback)
    session.load_weights({"l0.a": full(9, 2)})
    status = abort_reload(model, "changed my mind")
    if rollback != "none" or mode == "layerwise":
        assert (status, state_bytes(model)) == ("live", before)
    else:
        assert status == "torn"
        assert model.l0.a.tolist() == [9, 9]


@both_modes
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_model_hook_that_fails_after_the_data_leaves_live_or_torn(mode, rollback):
    bad = []

    def hook(model):
        model.l.w.data.mul_(2)
        model.kept = float(model.l.w.max())
        model.notes["max"] = model.kept
        if bad:
            raise RuntimeError("device lost")

    model = HookedNet(hook, l=Layer(w=zeros(2)))
    model.notes = {}
    cold(model, {"l.w": full(1, 2)})
    push(model, {"l.w": full(2, 2)}, mode, version=1)
    before = state_bytes(model)
    bad.append(1)
    with pytest.raises(RuntimeError, match="device lost"):
        push(model, {"l.w": full(3, 2)}, mode, rollback=rollback, version=2)
    if rollback == "none":
        assert reload_state(model) == "torn"
        with pytest.raises(TornModelError, match="device lost"):
            live_version(model)
    else:
        assert (reload_state(model), state_bytes(model), live_version(model)) == ("live", before, 1)
        assert (model.kept, model.notes) == (4.0, {"max": 4.0})
    bad.clear()
    push(model, {"l.w": full(4, 2)}, mode, version=3)
    assert (reload_state(model), live_version(model), model.l.w.tolist()) == ("live", 3, [8, 8])


@both_modes
def test_a_rollback_after_early_units_were_committed_restores_everything(mode):
    model = cold(build(double), weights(1))
    graph, before = Captured(model), state_bytes(model)
    manifest = Manifest.from_tensors(weights(9).items())
    session = start_reload(model, mode=mode, manifest=manifest, rollback="host")
    session.load_weights({"l0.a": full(9, 2), "l0.b": full(9, 2)})
    assert model.l0.sum.tolist() == [18, 18]
    assert session.abort() == "live"
    graph.check(model)
    assert state_bytes(model) == before


def test_a_torn_model_serves_nothing_and_only_a_full_push_repairs_it():
    model = cold(build(), weights(1))
    push(model, weights(2), "direct", version=4)
    session = start_reload(model, mode="direct", version=5)
    session.load_weights({"l0.a": full(9, 2)})
    session.abort("lost the trainer")
    with pytest.raises(TornModelError, match="full push"):
        model()
    with pytest.raises(TornModelError, match="lost the trainer"):
        live_version(model)
    with pytest.raises(TornModelError, match="full"):
        start_reload(model, scope="partial")
    with pytest.raises(CoverageError):
        push_in_chunks(model, {"l0.a": full(9, 2)}, "direct")
    assert reload_state(model) == "torn"
    push(model, weights(3), "layerwise", version=5)
    assert (reload_state(model), live_version(model), float(model())) == ("live", 5, 24.0)


@both_modes
def test_a_model_does_not_serve_while_it_loads(mode):
    model = cold(build(), weights(1))
    session = start_reload(model, mode=mode)
    with pytest.raises(ReloadError, match="open"):
        model()
    session.load_weights(weights(2))
    with pytest.raises(ReloadError, match="open"):
        model()
    session.finish()
    assert float(model()) == 16.0
    assert not model._forward_pre_hooks


def test_the_gate_holds_for_a_compiled_wrapper_that_was_traced_before():
    model = cold(build(), weights(1))
    compiled = torch.compile(model, backend="eager")
    assert float(compiled()) == 8.0
    session = start_reload(compiled)
    with pytest.raises(ReloadError, match="open"):
        compiled()
    session.load_weights(weights(2))
    session.finish()
    assert float(compiled()) == 16.0


def test_a_finished_session_keeps_no_tensor_alive():
    model = cold(build(double), weights(1))
    session = start_reload(model, mode="layerwise", rollback="device")
    session.load_weights(weights(2))
    session.finish()
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = zeros(0)
    gc.collect()
    assert [storage() for storage in storages] == [None] * 4


@both_modes
def test_a_failed_call_makes_the_session_unfinishable_and_publishes_nothing(mode):
    model = cold(build(), weights(1))
    push(model, weights(1), mode, version=1)
    session = start_reload(model, mode=mode, version=2, rollback="host")
    session.load_weights({"l0.a": full(9, 2)})
    with pytest.raises(CoverageError):
        session.load_weights({"l0.zz": full(9, 2)})
    with pytest.raises(ReloadError, match="failed before"):
        session.load_weights({"l0.b": full(9, 2)})
    with pytest.raises(ReloadError, match=r"failed before.*l0\.zz"):
        session.finish()
    assert (reload_state(model), live_version(model), model.l0.a.tolist()) == ("live", 1, [1, 1])


@both_modes
def test_an_error_at_start_leaves_the_model_serving(mode):
    model = cold(build(), weights(1))
    with pytest.raises(CoverageError):
        start_reload(model, mode=mode, manifest=Manifest.from_tensors(list(weights(2).items())[:3]))
    assert reload_state(model) == "live"
    assert float(model()) == 8.0
    push(model, weights(2), mode)


@both_modes
def test_a_block_that_raises_aborts(mode):
    model = cold(build(), weights(1))

    def broken_sender():
        yield "l0.a", full(9, 2)
        raise KeyError("sender died")

    with pytest.raises(KeyError, match="sender"), reload(model, mode=mode, rollback="host") as session:
        session.load_weights(broken_sender())
    assert (reload_state(model), model.l0.a.tolist()) == ("live", [1, 1])


@both_modes
def test_a_block_finishes_at_its_end(mode):
    model = cold(build(), weights(1))
    with reload(model, mode=mode, version=3) as session:
        session.load_weights(weights(2))
    assert (session.report.version, live_version(model), session.is_open) == (3, 3, False)


def test_versions_are_published_by_finish_alone_and_only_grow():
    model = cold(build(), weights(1))
    assert live_version(model) is None
    session = start_reload(model, version=5)
    session.load_weights(weights(2))
    assert live_version(model) is None
    session.finish()
    assert live_version(model) == 5
    for version in (4, 5):
        with pytest.raises(ReloadError, match="not newer"):
            start_reload(model, version=version)
    assert reload_state(model) == "live"
    session = start_reload(model)
    session.load_weights(weights(3))
    with pytest.raises(ReloadError, match="not newer"):
        session.finish(version=5)
    assert finish_reload(model, version=6).version == 6
    push(model, weights(4), "direct")
    assert live_version(model) is None
    with pytest.raises(ReloadError, match="newer than 6"):
        start_reload(model, version=6)


def test_prepare_does_all_but_publish():
    def hook(layer):
        double(layer)
        layer.largest = float(layer.sum.max())

    model = cold(build(hook), weights(1))
    session = start_reload(model, version=2, rollback="host")
    session.load_weights(weights(3))
    session.prepare()
    session.prepare()
    assert (reload_state(model), live_version(model), model.l0.sum.tolist()) == ("loading", None, [6, 6])
    with pytest.raises(ReloadError, match="prepared"):
        session.load_weights(weights(3))
    assert session.abort("another rank failed") == "live"
    assert (model.l0.sum.tolist(), model.l0.largest, live_version(model)) == ([2, 2], 2.0, None)


def test_calls_out_of_turn_are_refused():
    model = cold(build(), weights(1))
    for call in (finish_reload, abort_reload):
        with pytest.raises(ReloadError, match="no reload session"):
            call(model)
    session = start_reload(model)
    session.abort()
    for call in (session.finish, session.abort, lambda: session.load_weights({}), session.prepare):
        with pytest.raises(ReloadError, match="over"):
            call()
    for option, value in {
        "mode": "sideways",
        "scope": "half",
        "rollback": "disk",
        "casts": "x",
        "held_policy": "y",
    }.items():
        with pytest.raises(ValueError, match=option):
            start_reload(model, **{option: value})
    assert reload_state(model) == "live"


@both_modes
def test_of_many_threads_one_gets_the_session_and_is_unharmed(mode):
    model = cold(build(), weights(1))
    barrier, sessions, refusals = threading.Barrier(8), [], []

    def compete():
        barrier.wait(timeout=60)
        try:
            sessions.append(start_reload(model, mode=mode))
        except ReloadError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (len(sessions), len(refusals)) == (1, 7)
    assert all("open" in refusal for refusal in refusals)
    sessions[0].load_weights(weights(2))
    sessions[0].finish()
    assert float(model()) == 16.0


def test_a_sleeping_model_is_refused_and_unharmed():
    model = cold(build(), weights(1))
    model.asleep = True
    with pytest.raises(ReloadError, match="asleep"):
        start_reload(model)
    model.asleep = False
    model.l0.a.untyped_storage().resize_(0)
    with pytest.raises(ReloadError, match=r"no memory: l0\.a"):
        start_reload(model)
    assert reload_state(model) == "live"


def test_pending_expert_moves_are_refused():
    model = cold(build(), weights(1))
    model.l1.pending_expert_moves = [3]
    with pytest.raises(ReloadError, match=r"pending in l1"):
        start_reload(model)
    model.l1.pending_expert_moves = []
    push(model, weights(2), "direct")


@both_modes
def test_logical_weights_follow_the_present_placement_to_every_replica(mode):
    model = MoENet(1, 3, local=[0, 1, 2, 0])
    cold(model, model.checkpoint(1))
    push(model, model.checkpoint(2), mode)
    model.layers[0].experts.local = [2, 0, 1, 2]
    for seed in (3, 4):
        push(model, model.checkpoint(seed), mode)
        wanted = model.checkpoint(seed)
        for slot, expert in enumerate([2, 0, 1, 2]):
            halves = [wanted[f"layers.0.experts.{expert}.{shard}"] for shard in ("w1", "w3")]
            assert torch.equal(model.layers[0].experts.w13[slot], torch.cat(halves))
            assert torch.equal(model.layers[0].experts.w2[slot], wanted[f"layers.0.experts.{expert}.w2"])


@both_modes
def test_experts_of_other_ranks_are_dropped_not_held(mode):
    model = MoENet(2, 4, local=[1, 3])
    cold(model, model.checkpoint(1))
    report = push(model, model.checkpoint(2), mode)
    assert len(report.dropped) == 2 * 2 * 3
    assert {name.split(".")[3] for name in report.dropped} == {"0", "2"}
    assert report.peak_held_bytes == 0
    assert torch.equal(model.layers[1].experts.w2[1], model.checkpoint(2)["layers.1.experts.3.w2"])


@both_modes
def test_a_layer_refused_after_others_were_committed_is_rolled_back_with_them(mode):
    sizes = [2, 2, 2, 3]

    def hook(layer):
        layer.d = zeros(sizes.pop(0))

    model = cold(build(hook), weights(1))
    before = state_bytes(model)
    with pytest.raises(LayoutError, match=r"l1\.d"):
        push(model, weights(2), mode, rollback="device")
    assert (reload_state(model), state_bytes(model)) == ("live", before)


@both_modes
def test_a_loader_that_writes_more_than_its_names_is_rolled_back_too(mode):
    class Spreading(Net):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor * 2)
                if name == "l.a" and tensor.max().item() > 3:
                    self.largest.fill_(tensor.max().item())

    model = Spreading(l=Layer(a=zeros(2)), m=Layer(a=zeros(2)))
    model.register_buffer("largest", zeros(1), persistent=False)
    cold(model, {"l.a": full(1, 2), "m.a": full(1, 2)})
    before = state_bytes(model)
    session = start_reload(model, mode=mode, rollback="host")
    session.load_weights({"l.a": full(5, 2)})
    session.abort()
    assert (reload_state(model), state_bytes(model)) == ("live", before)


def test_the_journal_counts_what_it_keeps():
    model = cold(build(), weights(1))
    assert push(model, weights(2), "direct").journal_bytes == 0
    assert push(model, weights(2), "direct", rollback="host").journal_bytes == 4 * 2 * 4


def test_a_copied_model_starts_without_a_session_of_its_own():
    import copy

    model = cold(build(), weights(1))
    session = start_reload(model)
    other = copy.deepcopy(model)
    session.abort()
    assert reload_state(other) == "live"
    assert live_version(other) is None
    assert torch.equal(other.l0.a, codes(1, 1).expand(2))
