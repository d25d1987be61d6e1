"""The plugin's contract with vLLM, without a server: what it registers, what it implements, what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from weightsync import control
from weightsync.errors import ReloadError
from weightsync.integrations import vllm as plugin
from weightsync.integrations import vllm_engine
from weightsync.reachable import walk
from weightsync.reload.state import state_of

pytestmark = pytest.mark.vllm


def config(**changes):
    parallel = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0, "world_size": 1}
    settings = {"additional_config": changes.pop("additional_config", {})}
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(**(parallel | changes)),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
        instance_id="tests",
        **settings,
    )


def make_engine(**changes):
    model = torch.nn.Linear(2, 2)
    return vllm_engine.WeightSyncEngine(types.SimpleNamespace(backend="weightsync"), config(**changes), "cpu", model)


def test_the_entry_point_registers_the_backend_once():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    (entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "weightsync"]
    register = entry.load()
    register()
    before = dict(vars(importlib.import_module("vllm.model_executor.model_loader.utils")))
    register()
    assert WeightTransferEngineFactory._registry["weightsync"]() is vllm_engine.WeightSyncEngine
    after = vars(importlib.import_module("vllm.model_executor.model_loader.utils"))
    assert after["record_metadata_for_reloading"] is before["record_metadata_for_reloading"]


def test_the_engine_implements_every_method_of_vllms_class():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    assert not inspect.isabstract(vllm_engine.WeightSyncEngine)
    for name in WeightTransferEngine.__abstractmethods__:
        theirs = inspect.signature(getattr(WeightTransferEngine, name)).parameters
        ours = inspect.signature(getattr(vllm_engine.WeightSyncEngine, name)).parameters
        assert list(theirs) == list(ours), name


def test_init_info_has_the_fields_of_the_handshake():
    ours = {f.name: f.type for f in dataclasses.fields(vllm_engine.InitInfo)}
    assert ours == {f.name: f.type for f in dataclasses.fields(control.Hello)}


def test_init_info_with_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match="master_address"):
        make_engine().parse_init_info({"master_address": "127.0.0.1"})


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.320.1"])
def test_another_version_of_vllm_is_refused_by_name(version):
    with pytest.raises(RuntimeError, match=rf"0\.32 and 0\.33.*{version}"):
        plugin.check_version(version)


def test_another_version_of_vllm_is_left_as_it_is_and_refuses_who_selects_the_backend(monkeypatch):
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    def changed():
        raise AttributeError("this vLLM has no such function")

    monkeypatch.setattr(vllm, "__version__", "0.35.1")
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    for name in ("_add_worker_method", "_record_layouts_after_construction", "_add_routes"):
        monkeypatch.setattr(plugin, name, changed)
    plugin.register()
    plugin.register()
    engine_class = WeightTransferEngineFactory._registry["weightsync"]()
    with pytest.raises(RuntimeError, match=r"works with vLLM 0\.32 and 0\.33, this is vLLM 0\.35\.1"):
        engine_class(types.SimpleNamespace(backend="weightsync"), config(), "cpu", torch.nn.Linear(2, 2))


def test_a_vllm_that_knows_no_weight_transfer_engines_starts_with_a_warning(monkeypatch, caplog):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.9.2")
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    plugin.register()
    assert "works with vLLM 0.32 and 0.33, this is vLLM 0.9.2" in caplog.text


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1+cu130"])
def test_supported_versions_pass(version):
    plugin.check_version(version)


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="rollbakc"):
        make_engine(additional_config={"weightsync": {"rollbakc": "host"}})


def test_data_parallel_engines_are_refused_with_the_remedy():
    with pytest.raises(RuntimeError, match="one server per replica"):
        make_engine(data_parallel_size=2)


def test_a_worker_with_another_backend_answers_with_an_error():
    result = vllm_engine.answer(types.SimpleNamespace(weight_transfer_engine=object()), control.INFO, {})
    assert result["error"]["type"] == "ReloadError"
    assert "weight-transfer-config" in result["error"]["message"]


def test_the_receivers_own_error_crosses_with_its_class(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "_as_while_loading", lambda: __import__("contextlib").nullcontext())
    runner = types.SimpleNamespace(reset_lora_state=lambda: None)
    worker = types.SimpleNamespace(weight_transfer_engine=engine, model_runner=runner)
    result = vllm_engine.answer(worker, control.FINISH, {"session_id": "nobody"})
    with pytest.raises(ReloadError, match="init_weight_transfer_engine first"):
        vllm_engine.ranks_of([result])
    assert vllm_engine.answer(worker, control.INFO, {})["rank"]["weight_version"] is None


def test_start_without_a_trainer_is_refused():
    with pytest.raises(ReloadError, match="init_weight_transfer_engine"):
        make_engine().start_weight_update()


def test_update_info_must_say_something():
    with pytest.raises(Exception, match="start"):
        make_engine().update_weights({})


def test_no_update_starts_while_the_weights_are_not_mapped():
    class Worker:
        def sleep(self, level=1):
            return level

        def wake_up(self, tags=None):
            return tags

        def reload_weights(self):
            return "reloaded"

    plugin.watch_worker(Worker)
    watched = Worker.sleep
    plugin.watch_worker(Worker)
    assert Worker.sleep is watched
    engine, worker = make_engine(), Worker()
    engine._worker = worker
    assert engine._why_not_ready() is None
    assert worker.sleep(2) == 2
    assert "wake it up" in engine._why_not_ready()
    worker.wake_up(["kv_cache"])
    assert engine._why_not_ready() is not None
    worker.wake_up(["weights"])
    assert engine._why_not_ready() is None


def test_a_reload_of_vllms_own_takes_the_version_away_and_is_refused_during_a_push():
    class Worker:
        def sleep(self, level=1):
            return level

        def wake_up(self, tags=None):
            return tags

        def reload_weights(self, weights_path):
            return weights_path

    plugin.watch_worker(Worker)
    engine, worker = make_engine(), Worker()
    worker.weight_transfer_engine = engine
    state = state_of(engine.model)
    state.version = state.newest_version = 4
    assert worker.reload_weights(weights_path="there") == "there"
    assert engine.receiver.info()["weight_version"] is None
    assert state.newest_version == 4
    state.status = "loading"
    with pytest.raises(ReloadError, match="under way"):
        worker.reload_weights("there")
    assert Worker().reload_weights("no engine") == "no engine"


def test_attention_scales_are_declared_optional_and_nothing_else_is():
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    model = torch.nn.ModuleDict({"attn": torch.nn.Module(), "proj": torch.nn.Linear(2, 2)})
    model["attn"].quant_method = BaseKVCacheMethod(quant_config=None)
    model["attn"].quant_method.create_weights(model["attn"])
    plugin._declare_optional_scales(model)
    optional = {n for n, p in model.named_parameters() if getattr(p, "weight_loader_optional", False)}
    assert optional == {f"attn.{name}_scale" for name in ("q", "k", "v", "prob")}


def test_a_native_handle_keeps_the_scales_that_it_was_made_with(monkeypatch):
    from vllm import _custom_ops

    class Handle:
        pass

    monkeypatch.setattr(_custom_ops, "create_onednn_scaled_mm", lambda weight, scales, *rest: Handle(), raising=False)
    plugin._keep_scales_of_native_handles()
    plugin._keep_scales_of_native_handles()
    assert not hasattr(_custom_ops.create_onednn_scaled_mm.__wrapped__, "__wrapped__")
    scales = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    address = scales.data_ptr()
    handle = _custom_ops.create_onednn_scaled_mm(torch.ones(2, 3), scales, torch.bfloat16, True, False, 32)
    scales.data = torch.zeros(3)
    assert handle.weightsync_scales.data_ptr() == address
    assert handle.weightsync_scales.tolist() == [1.0, 1.0, 1.0]


def test_what_vllm_lets_a_draft_model_share_is_no_part_of_the_draft():
    embedding = torch.nn.Embedding(3, 2)
    engine = make_engine()
    engine.receiver.targets["model"] = torch.nn.ModuleDict({"embed": embedding, "own": torch.nn.Linear(2, 2)})
    draft = torch.nn.ModuleDict({"embed": embedding, "layer": torch.nn.Linear(2, 2)})
    engine._add_draft(draft)
    engine.set_weight_update_target(draft, None)
    assert set(engine.receiver.targets) == {"model", "draft"}
    assert {slot.path for slot in walk(draft)} == {"layer.weight", "layer.bias"}
    engine.reset_weight_update_target()
    assert engine.model is not draft


def test_the_plugin_needs_neither_cuda_nor_triton_nor_deep_gemm():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('triton', 'deep_gemm', 'sgl_deep_gemm')))\n"
        "import weightsync.integrations.vllm as plugin; plugin.register()\n"
        "import weightsync.integrations.vllm_engine, weightsync.integrations.vllm_routes, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('imported')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.strip().endswith("imported")
