"""Real models in a real server: a push equals a cold start, and what must not be pushed is refused by name.

One server per architecture runs through the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from checkpoints_vllm import ARCHITECTURES, make_checkpoint, read_checkpoint
from engines_vllm import cold_tokens
from jobs_vllm import PROMPTS
from server_vllm import VllmServer

from weightsync.errors import CoverageError, LayoutError, ManifestError
from weightsync.manifest import ParamMeta
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import TensorSource, WeightSource

pytestmark = pytest.mark.vllm
TRANSPORTS = ("shared_memory", "gloo")


@dataclass
class Engine:
    """A server of one architecture, and its two checkpoints."""

    name: str
    server: VllmServer
    a: Path
    b: Path
    holds: Path

    def tokens(self) -> list[list[int]]:
        """What it generates now."""
        return [self.server.generate(prompt) for prompt in PROMPTS]

    def push(self, checkpoint: Path, **options):
        """Pushes a whole checkpoint and gives the report."""
        with TrainerClient(TensorSource(dict(read_checkpoint(checkpoint))), self.server.url, **options) as client:
            report = client.push()
        self.holds = checkpoint
        return report


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request, checkpoints, tmp_path_factory):
    """A server that starts with checkpoint a."""
    a, b = (make_checkpoint(request.param, which, checkpoints) for which in "ab")
    server = VllmServer(a, tmp_path_factory.mktemp("log") / f"{request.param}.log").begin()
    with server:
        assert cold_tokens(a) != cold_tokens(b)
        yield Engine(request.param, server, a, b, holds=a)


@pytest.fixture
def at_a(engine):
    """The engine, holding checkpoint a."""
    if engine.holds != engine.a:
        engine.push(engine.a)
    return engine


def test_before_the_first_push_it_serves_its_checkpoint_and_names_no_version(engine):
    assert engine.server.get("weight_info")["weight_version"] is None
    assert engine.tokens() == cold_tokens(engine.a)


@pytest.mark.parametrize("mode", ["layerwise", "direct"])
def test_pushing_what_it_has_changes_no_token(at_a, mode):
    report = at_a.push(at_a.a, mode=mode)
    assert at_a.tokens() == cold_tokens(at_a.a)
    assert at_a.server.get("weight_info")["weight_version"] == report.version


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["layerwise", "direct"])
def test_a_push_equals_a_cold_start_and_back(at_a, mode, transport):
    for checkpoint in (at_a.b, at_a.a):
        report = at_a.push(checkpoint, mode=mode, transport=transport)
        assert at_a.tokens() == cold_tokens(checkpoint)
        assert at_a.server.get("weight_info")["weight_version"] == report.version
        assert report.transport == transport


def test_the_report_names_the_modules_that_a_direct_push_had_to_stage_and_why(at_a):
    staged = at_a.push(at_a.a, mode="direct").ranks[0]["targets"]["model"]["fallbacks"]
    assert "process_weights_after_loading may change its layout" in staged["model.layers.0.self_attn.o_proj"]
    assert all(reason for reason in staged.values())
    for norm in ("model.norm", "model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"):
        assert norm not in staged


class Altered(WeightSource):
    """A checkpoint with one entry taken out, added, or changed."""

    def __init__(self, weights):
        self.weights = weights
        self._metadata = None

    @property
    def metadata(self):
        if self._metadata is None:
            self._metadata = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.weights]
        return self._metadata

    def iter_full(self):
        yield from self.weights


NORM = "model.layers.1.post_attention_layernorm.weight"
PROJECTION = "model.layers.1.self_attn.o_proj.weight"


def missing(weights):
    return [(n, t) for n, t in weights if n != NORM]


def misnamed(weights):
    return [(n.replace("layers.1.post_attention_layernorm", "layers.1.post_attention_norm"), t) for n, t in weights]


def duplicated(weights):
    return [*weights, *[(n, t) for n, t in weights if n == NORM]]


def misshaped(weights):
    return [(n, t[:, :-1] if n == PROJECTION else t) for n, t in weights]


def mistyped(weights):
    return [(n, t.to(torch.float64) if n == PROJECTION else t) for n, t in weights]


@pytest.mark.parametrize("mode", ["layerwise", "direct"])
@pytest.mark.parametrize(
    ("alter", "error", "name"),
    [
        (missing, CoverageError, "layers.1.post_attention_layernorm"),
        (misnamed, CoverageError, "layers.1.post_attention_norm"),
        (duplicated, (CoverageError, ManifestError), "layers.1.post_attention_layernorm"),
        (misshaped, LayoutError, "o_proj"),
        (mistyped, LayoutError, "o_proj"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_push_that_does_not_fit_is_refused_by_name(at_a, mode, alter, error, name):
    before = at_a.server.get("weight_info")
    with (
        TrainerClient(Altered(alter(read_checkpoint(at_a.b))), at_a.server.url, mode=mode) as client,
        pytest.raises(error, match=name),
    ):
        client.push()
    assert at_a.tokens() == cold_tokens(at_a.a)
    after = at_a.server.get("weight_info")
    assert (after["weight_version"], after["state"], after["is_paused"]) == (before["weight_version"], "live", False)


def test_with_casts_allowed_a_tensor_of_another_dtype_is_cast_by_the_loader(at_a):
    weights = dict(read_checkpoint(at_a.b))
    with TrainerClient(
        TensorSource({n: t.float() if n == NORM else t for n, t in weights.items()}), at_a.server.url, casts="allow"
    ) as client:
        report = client.push()
    at_a.holds = at_a.b
    assert at_a.tokens() == cold_tokens(at_a.b)
    assert NORM in report.ranks[0]["targets"]["model"]["interpreted"]


def test_scales_that_a_checkpoint_may_lack_are_taken_and_are_gone_after_a_push_without_them(at_a):
    if at_a.name != "llama_int8":
        with pytest.raises(CoverageError, match=r"self_attn\.k_scale"):
            push_with_scales(at_a)
        return
    taken = push_with_scales(at_a)
    assert taken.ranks[0]["targets"]["model"]["num_names"] == len(read_checkpoint(at_a.a)) + 6
    at_a.push(at_a.a)
    assert at_a.tokens() == cold_tokens(at_a.a)


def push_with_scales(engine):
    """Checkpoint b with scales of the attention's keys, values and queries."""
    scales = {f"model.layers.{i}.self_attn.{which}_scale": torch.tensor([2.0]) for i in (0, 1) for which in "qkv"}
    weights = dict(read_checkpoint(engine.b)) | scales
    with TrainerClient(TensorSource(weights), engine.server.url) as client:
        report = client.push()
    engine.holds = engine.b
    return report
