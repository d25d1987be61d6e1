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
from cold_vllm import PROMPTS, cold_tokens
from server_vllm import VllmServer

from weightsync.errors import CoverageError, LayoutError, ManifestError
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import TensorSource, WeightSource

pytestmark = pytest.mark.vllm
TRANSPORTS = ("shared_memory", "gloo")
# INT8 Llama is not among them: vLLM gives its attention layers scales that no checkpoint has to hold, and coverage
# calls them missing, so every push is refused (docs/VLLM.md, Limits).
PUSHABLE = [name for name in ARCHITECTURES if name != "llama_int8"]


@dataclass
class Engine:
    """A server of one architecture, and its two checkpoints."""

    server: VllmServer
    a: Path
    b: Path

    def tokens(self) -> list[list[int]]:
        """What it generates now."""
        return [self.server.generate(prompt) for prompt in PROMPTS]

    def push(self, checkpoint: Path, **options):
        """Pushes a whole checkpoint and gives the report."""
        with TrainerClient(TensorSource(dict(read_checkpoint(checkpoint))), self.server.url, **options) as client:
            return client.push()


@pytest.fixture(scope="module", params=PUSHABLE)
def engine(request, checkpoints, tmp_path_factory):
    """A server that starts with checkpoint a."""
    a, b = (make_checkpoint(request.param, which, checkpoints) for which in "ab")
    with VllmServer(a, tmp_path_factory.mktemp("log") / "server.log") as server:
        yield Engine(server, a, b)


def test_before_the_first_push_it_serves_its_checkpoint_and_names_no_version(engine):
    assert engine.server.get("weight_info")["weight_version"] is None
    assert engine.tokens() == cold_tokens(engine.a)


@pytest.mark.parametrize("mode", ["layerwise", "direct"])
def test_pushing_what_it_has_changes_no_token(engine, mode):
    engine.push(engine.a, mode=mode)
    assert engine.tokens() == cold_tokens(engine.a)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["layerwise", "direct"])
def test_a_push_equals_a_cold_start_and_back(engine, mode, transport):
    for checkpoint in (engine.b, engine.a, engine.b, engine.a):
        report = engine.push(checkpoint, mode=mode, transport=transport)
        assert engine.tokens() == cold_tokens(checkpoint)
        assert engine.server.get("weight_info")["weight_version"] == report.version
        assert report.transport == transport


def test_the_report_names_the_modules_that_a_direct_push_had_to_stage_and_why(engine):
    staged = engine.push(engine.a, mode="direct").ranks[0]["targets"]["model"]["fallbacks"]
    assert "process_weights_after_loading may change its layout" in staged["model.layers.0.self_attn.o_proj"]
    assert "model.norm" not in staged
    assert "model.layers.0.input_layernorm" not in staged


class Altered(WeightSource):
    """A checkpoint with one entry taken out, added, or changed."""

    def __init__(self, weights):
        self.weights = weights
        self._metadata = None

    @property
    def metadata(self):
        if self._metadata is None:
            from weightsync.manifest import ParamMeta

            self._metadata = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.weights]
        return self._metadata

    def iter_full(self):
        yield from self.weights


NORM = "model.layers.1.post_attention_layernorm.weight"


def missing(weights):
    return [(n, t) for n, t in weights if n != NORM]


def misnamed(weights):
    return [(n.replace("layers.1.post_attention_layernorm", "layers.1.post_attention_norm"), t) for n, t in weights]


def duplicated(weights):
    return [*weights, *[(n, t) for n, t in weights if n == NORM]]


def misshaped(weights):
    return [(n, t[:, :-1] if n == "model.layers.1.self_attn.o_proj.weight" else t) for n, t in weights]


def mistyped(weights):
    return [(n, t.to(torch.float32) if n == "model.layers.1.self_attn.o_proj.weight" else t) for n, t in weights]


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
def test_a_push_that_does_not_fit_is_refused_by_name(engine, mode, alter, error, name):
    before = engine.server.get("weight_info")
    with (
        TrainerClient(Altered(alter(read_checkpoint(engine.b))), engine.server.url, mode=mode) as client,
        pytest.raises(error, match=name),
    ):
        client.push()
    assert engine.tokens() == cold_tokens(engine.a)
    assert engine.server.get("weight_info")["weight_version"] == before["weight_version"]
