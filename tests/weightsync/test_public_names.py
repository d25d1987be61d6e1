"""The public surface: one sorted list, every name resolves, and importing it is light."""

import subprocess
import sys

import pytest
from toys import Layer, Net, full, zeros

import weightsync

DESIGNED = """
start_reload finish_reload abort_reload reload record_layouts ReloadSession ReloadReport Receiver serve TrainerClient
PushReport WeightSource ModuleSource CheckpointSource ParamMeta fingerprint Fingerprint plan_reload ReloadPlan
WeightSyncError ManifestError CoverageError LayoutError TransportError TransportTimeout PeerFailed ProtocolError
ReloadError TornModelError VerifyError
"""


def test_all_is_sorted_unique_and_holds_the_designed_names():
    assert weightsync.__all__ == sorted(set(weightsync.__all__))
    assert set(DESIGNED.split()) <= set(weightsync.__all__)


@pytest.mark.parametrize("name", weightsync.__all__)
def test_every_name_resolves(name):
    assert callable(getattr(weightsync, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        weightsync.no_such_name  # noqa: B018


def test_importing_the_package_loads_none_of_its_rooms_and_no_optional_dependency():
    rooms = ["weightsync.reload", "weightsync.plan", "weightsync.trainer", "weightsync.worker"]
    others = ["httpx", "starlette", "uvicorn", "typer", "rich", "prometheus_client", "safetensors", "triton", "torch"]
    heavy = rooms + others
    code = f"import sys, weightsync; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"


def test_the_package_called_reload_is_also_the_context_manager():
    import weightsync.reload.session as session

    assert weightsync.reload is sys.modules["weightsync.reload"]
    model = Net(l=Layer(w=zeros(2)))
    with weightsync.reload(model) as opened:
        assert isinstance(opened, session.ReloadSession)
        opened.load_weights({"l.w": full(3, 2)})
    assert model.l.w.tolist() == [3, 3]
