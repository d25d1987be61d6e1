"""Routing against loops over tokens, and against the stock DeepSeek-V3 router."""

import math

import pytest
import torch

from megamoe_adapter.routing import SCORING, Routing, mask_padding, to_physical


def score(z, scoring, logits):
    if scoring == "softmax":
        return math.exp(z - max(logits)) / sum(math.exp(other - max(logits)) for other in logits)
    if scoring == "sqrtsoftplus":
        return math.sqrt(math.log1p(math.exp(z)))
    return 1 / (1 + math.exp(-z))


def route_by_hand(routing, logits, bias):
    """One token, by sorting."""
    p = [score(z, routing.scoring, logits) for z in logits]
    choice = [value + (0.0 if bias is None else bias[e]) for e, value in enumerate(p)]
    size = len(p) // routing.num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(routing.num_groups)]
    worth = [sum(group[:2]) if bias is not None else group[0] for group in groups]
    best = sorted(range(routing.num_groups), key=lambda g: -worth[g])[: routing.topk_groups]
    allowed = [e for e in range(len(p)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: routing.top_k]
    total = sum(p[e] for e in chosen) if routing.renormalize else 1.0
    return {e: p[e] / total * routing.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize(
    ("scoring", "groups"), [*((scoring, (1, 1)) for scoring in SCORING), ("sigmoid", (4, 2)), ("softmax", (4, 2))]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_ids_and_weights_are_those_found_by_sorting(scoring, groups, with_bias, renormalize):
    routing = Routing(3, scoring, renormalize, 2.5, *groups)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 16, generator=generator)
    bias = torch.randn(16, generator=generator) * 0.3 if with_bias else None
    ids, weights = routing(logits, bias=bias)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    for token in range(40):
        expected = route_by_hand(routing, logits[token].tolist(), None if bias is None else bias.tolist())
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5)


def test_agrees_with_the_stock_deepseek_v3_router():
    deepseek = pytest.importorskip("transformers.models.deepseek_v3", reason="needs transformers with deepseek_v3")
    config = deepseek.configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    gate = deepseek.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(2)
    gate.weight.data = torch.randn(16, 32, generator=generator)
    gate.e_score_correction_bias.data = torch.rand(16, generator=generator)
    x = torch.randn(64, 32, generator=generator)
    with torch.no_grad():
        logits, stock_weights, stock_ids = gate(x)
    ids, weights = Routing(4, "sigmoid", True, 2.5, 4, 2)(logits, bias=gate.e_score_correction_bias.data)
    for token in range(64):
        expected = dict(zip(stock_ids[token].tolist(), stock_weights[token].tolist(), strict=True))
        assert dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


def test_logits_are_scored_in_float32():
    logits = torch.randn(8, 4).bfloat16()
    assert torch.equal(Routing(2)(logits)[1], Routing(2)(logits.float())[1])


def test_weights_of_ids_chosen_elsewhere_are_their_scores():
    logits = torch.randn(5, 8)
    ids = torch.randint(0, 8, (5, 2), dtype=torch.int32)
    got, weights = Routing(2, "sqrtsoftplus", renormalize=False)(logits, topk_ids=ids)
    assert torch.equal(got, ids.long())
    expected = torch.nn.functional.softplus(logits).sqrt().gather(1, ids.long())
    assert torch.allclose(weights, expected)


def test_renormalising_scores_that_underflowed_gives_no_nan():
    weights = Routing(2)(torch.full((3, 4), -200.0))[1]
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_k": 2, "scoring": "relu"}, "unknown scoring function 'relu'"),
        ({"top_k": 2, "num_groups": 2, "topk_groups": 3}, "topk_groups must be in 1..num_groups"),
        ({"top_k": 2, "num_groups": 2, "scoring": "sqrtsoftplus"}, "not for sqrtsoftplus"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Routing(**kwargs)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="logits must be"):
        Routing(2)(torch.randn(8))
    with pytest.raises(ValueError, match="bias must have shape"):
        Routing(2)(torch.randn(3, 8), bias=torch.zeros(4))
    with pytest.raises(ValueError, match="top_k 9 does not fit 8 experts"):
        Routing(9)(torch.randn(3, 8))
    with pytest.raises(ValueError, match="top_k 3 does not fit"):
        Routing(3, num_groups=4, topk_groups=1)(torch.randn(3, 8))
    with pytest.raises(ValueError, match="topk_ids must have shape"):
        Routing(2)(torch.randn(3, 8), topk_ids=torch.zeros(3, 3))


def test_padding_is_taken_out_of_the_routing():
    ids, weights = torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2)
    got_ids, got_weights = mask_padding(ids, weights, torch.tensor([False, True, False]))
    assert got_ids.tolist() == [[1, 1], [-1, -1], [1, 1]]
    assert got_weights.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert ids.min() == 1, "the inputs are left alone"


def test_replicas_share_tokens_and_padding_stays():
    table = torch.tensor([[0, 4], [1, -7], [2, 5]])
    physical = to_physical(torch.tensor([[0, 1], [0, -1], [2, 0], [2, 1]]), table, torch.tensor([2, 1, 2]))
    assert physical.tolist() == [[0, 1], [0, -1], [2, 4], [2, 1]]
    many = to_physical(torch.zeros(101, 1, dtype=torch.int64), table, torch.tensor([2, 1, 2]))
    assert many.flatten().bincount().tolist() == [51, 0, 0, 0, 50]
