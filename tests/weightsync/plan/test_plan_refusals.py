"""What can't be planned is refused before a byte moves: all names at once, each with what was expected and got."""

import pytest
import torch
from planning_toys import plan_for, snapshot, treatments, wire_tensor
from test_plan_loaders import MoE, Toy, expert_weights, into, zeros
from torch import nn

from weightsync.errors import CoverageError, LayoutError, PlanError
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload


def refused(model, weights, error, **options):
    """The error that planning raises, checked to have left no trace."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        plan_reload(model, Manifest.from_tensors(weights), **options)
    assert snapshot(model) == before
    return caught.value


def sent(**shapes):
    return [(name, wire_tensor(shape)) for name, shape in shapes.items()]


def test_missing_names_are_all_listed():
    error = refused(Toy({"a": zeros(2), "b": zeros(2), "scale": zeros(1)}), sent(a=(2,)), CoverageError)
    assert error.missing == ("b", "scale")
    assert "b, scale" in str(error)


def test_the_same_name_twice_in_the_right_number_of_elements_is_not_complete():
    class LeftRight(Toy):
        def load_weights(self, weights):
            for name, tensor in weights:
                half = self.w.data[:4] if name.startswith("left") else self.w.data[4:]
                half.copy_(tensor)

    model = LeftRight({"w": zeros(8)})
    assert treatments(plan_for(model, sent(left=(4,), right=(4,)))) == {"left": "copy", "right": "copy"}
    error = refused(model, sent(left=(4,), left_again=(4,)), CoverageError)
    assert error.missing == ("w[4:8]",)
    assert error.duplicated == ("left", "left_again")


def test_unknown_names_are_errors_whether_the_loader_raises_or_drops_them():
    class Drops(Toy):
        def load_weights(self, weights):
            for name, tensor in weights:
                if name in ("dropped", "also_dropped"):
                    continue
                dict(self.named_parameters())[name].data.copy_(tensor)

    weights = sent(w=(2,), dropped=(1,), nobody=(1,), also_dropped=(3,), nobody_else=(2,), v=(2,))
    error = refused(Drops({"w": zeros(2), "v": zeros(2)}), weights, CoverageError)
    assert set(error.unexpected) == {"dropped", "nobody", "also_dropped", "nobody_else"}
    assert not error.missing
    assert "KeyError" in str(error)


def test_every_bad_name_is_found_when_the_loader_reads_all_names_first():
    class ListFirst(Toy):
        def load_weights(self, weights):
            for name, tensor in list(weights):
                dict(self.named_parameters())[name].data.copy_(tensor)

    weights = sent(bad0=(1,), w=(2,), bad1=(1,), v=(2,), bad2=(1,))
    error = refused(ListFirst({"w": zeros(2), "v": zeros(2)}), weights, CoverageError)
    assert set(error.unexpected) == {"bad0", "bad1", "bad2"}
    assert not error.missing


def test_every_shape_mismatch_is_listed_with_both_shapes():
    class Asserts(Toy):
        def load_weights(self, weights):
            for name, tensor in weights:
                param = getattr(self, name)
                if name == "strict":
                    assert param.shape == tensor.shape, (param.shape, tensor.shape)
                param.data.copy_(tensor)

    params = {name: zeros(4, 6) for name in ("fine", "wrong", "strict", "other")}
    weights = sent(wrong=(6, 4), strict=(2, 6), fine=(4, 6), other=(5,))
    error = refused(Asserts(params), weights, LayoutError)
    assert set(error.names) == {"wrong", "strict", "other"}
    assert not isinstance(error, CoverageError)
    assert "wrong: shape mismatch: expected float32[4, 6] for wrong, got float32[6, 4]" in str(error)
    assert "strict: its loader raised AssertionError" in str(error)


@pytest.mark.parametrize("case", ["copy_", "row", "item", "rows by index", "slice of rows"])
def test_a_silent_broadcast_is_refused(case):
    rules = {
        "copy_": (into("w"), (6,)),
        "row": (into("w", source=lambda t: t[0]), (4, 6)),
        "item": (lambda m, t: m.w.data.__setitem__(slice(0, 4), t), (6,)),
        "rows by index": (lambda m, t: m.w.data.__setitem__(torch.tensor([0, 1, 2, 3]), t), (6,)),
        "slice of rows": (lambda m, t: m.w.data.__setitem__(slice(0, 4), t), (1, 6)),
    }
    rule, shape = rules[case]
    error = refused(Toy({"w": zeros(4, 6)}, {"w": rule}), sent(w=shape), LayoutError)
    assert "silent broadcast" in str(error)
    assert error.names == ("w",)


@pytest.mark.parametrize(
    ("live", "wire"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.uint8, torch.float8_e8m0fnu),
        (torch.float8_e4m3fn, torch.uint8),
        (torch.int32, torch.float32),
    ],
)
def test_an_implicit_cast_is_refused_unless_asked_for(live, wire):
    model = Toy({"w": zeros(4, dtype=live)})
    weights = [("w", zeros(4, dtype=wire))]
    error = refused(model, weights, LayoutError)
    assert "implicit cast" in str(error)
    assert str(wire).removeprefix("torch.") in str(error)
    plan = plan_for(model, weights, casts="allow")
    assert treatments(plan) == {"w": "opaque"}


def test_a_byte_view_of_one_side_only_is_a_numeric_trap():
    fp8 = torch.float8_e4m3fn
    model = Toy({"w": zeros(4, dtype=fp8)}, {"w": into("w", source=lambda t: t.view(torch.uint8))})
    assert "implicit cast" in str(refused(model, [("w", zeros(4, dtype=fp8))], LayoutError))


def test_tied_parameters_take_one_name_and_refuse_two():
    model = Toy({"embed": zeros(6, 2)})
    model.head = model.embed
    assert treatments(plan_for(model, sent(embed=(6, 2)))) == {"embed": "copy"}
    error = refused(model, sent(embed=(6, 2), head=(6, 2)), CoverageError)
    assert set(error.duplicated) == {"embed", "head"}
    plan = plan_for(model, sent(embed=(6, 2), head=(6, 2)), ignore=["head"])
    assert plan.ignored == ("head",)


def test_overlapping_names_are_both_listed_and_innocent_ones_are_not():
    rules = {
        "x": into("w", lambda p: p[:, 0:2]),
        "y": into("w", lambda p: p[:, 1:3]),
        "z": into("w", lambda p: p[:, 3:6]),
    }
    error = refused(Toy({"w": zeros(4, 6)}, rules), sent(x=(4, 2), y=(4, 2), z=(4, 3)), CoverageError)
    assert set(error.duplicated) == {"x", "y"}


def test_an_expanded_target_is_refused():
    error = refused(
        Toy({"w": zeros(1, 6)}, {"w": into("w", lambda p: p.expand(4, 6))}),
        sent(w=(4, 6)),
        LayoutError,
        scope="partial",
    )
    assert "share a byte" in str(error)


@pytest.mark.parametrize(
    "rule",
    [
        lambda m, t: m.w.data.add_(t),
        lambda m, t: m.w.data.copy_(m.w.data * 0.5 + t),
        lambda m, t: torch.add(m.w.data, t, out=m.w.data),
        lambda m, t: m.w.data.copy_(t).lerp_(m.other.data, 0.5),
        lambda m, t: (m.w.data[0].copy_(t[0]), m.w.data.mul_(2)),
    ],
    ids=["add_", "blend", "out", "lerp with a tensor that is loaded later", "only half is its own"],
)  # fmt: skip
def test_reading_old_bytes_of_what_is_written_cannot_be_replayed(rule):
    model = Toy({"w": zeros(2, 3), "other": zeros(2, 3)}, {"w": rule})
    error = refused(model, sent(w=(2, 3), other=(2, 3)), LayoutError)
    assert "old bytes" in str(error)
    assert error.names == ("w",)


def test_writing_outside_of_any_weight_is_refused_where_weights_write_too():
    class Clears(Toy):
        def load_weights(self, weights):
            self.w.data.zero_()
            self.counter.zero_()
            super().load_weights(weights)

    model = Clears({"w": zeros(4)}, {"w": into("w", lambda p: p[:2])}, {"counter": zeros(1)})
    error = refused(model, sent(w=(2,)), LayoutError)
    assert "outside of any weight" in str(error)
    Clears.load_weights = lambda self, weights: (self.counter.zero_(), Toy.load_weights(self, weights))[1]
    plan = plan_for(model, sent(w=(2,)))
    assert "counter" in plan.explain()


def test_a_loader_that_raises_half_way_leaves_no_trace():
    class Breaks(Toy):
        def __init__(self, *args):
            super().__init__(*args)
            self.seen, self.count, self.helper = [], 0, {"last": None}

        def load_weights(self, weights):
            for name, tensor in weights:
                self.seen.append(name)
                self.count += 1
                self.helper["last"] = name
                self.note = tensor
                self.register_buffer(f"late_{self.count}", torch.zeros(1))
                getattr(self, name).data.copy_(tensor)
                if name == "b":
                    raise RuntimeError("out of luck")
                self.table.fill_(self.count)

    model = Breaks({"a": zeros(2), "b": zeros(2), "c": zeros(2)}, None, {"table": zeros(3)})
    error = refused(model, sent(a=(2,), b=(2,), c=(2,)), LayoutError)
    assert error.names == ("b",)
    assert "RuntimeError: out of luck" in str(error)
    assert (model.seen, model.count, model.helper) == ([], 0, {"last": None})
    assert not hasattr(model, "late_1")


def test_an_interrupt_leaves_no_trace_either():
    class Interrupts(Toy):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.left = name
                self.w.data = tensor.new_zeros(7)
                raise KeyboardInterrupt

    model = Interrupts({"w": zeros(2)})
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        plan_reload(model, Manifest.from_tensors(sent(w=(2,))))
    assert snapshot(model) == before


def test_failing_before_the_first_weight_says_so():
    class Broken(Toy):
        def load_weights(self, weights):
            raise OSError("no config")

    error = refused(Broken({"w": zeros(2)}), sent(w=(2,)), LayoutError)
    assert "before it loaded any weight: OSError: no config" in str(error)


def test_rebinding_to_another_layout_is_refused():
    def rule(model, tensor):
        model.w = nn.Parameter(tensor.t(), requires_grad=False)

    error = refused(Toy({"w": zeros(2, 3)}, {"w": rule}), sent(w=(2, 3)), LayoutError)
    assert "expected float32[2, 3]" in str(error)


def test_coverage_and_layout_errors_come_as_one():
    error = refused(Toy({"a": zeros(2), "b": zeros(2), "c": zeros(2)}), sent(a=(3,), nobody=(1,), b=(2,)), PlanError)
    assert isinstance(error, CoverageError)
    assert isinstance(error, LayoutError)
    assert (error.names, error.missing, error.unexpected) == (("a",), ("c",), ("nobody",))


def test_a_tensor_that_came_in_the_wrong_shape_is_not_called_missing():
    weights = [(name, t[:-1] if name == "experts.1.w3.weight" else t) for name, t in expert_weights(4)]
    error = refused(MoE(4), weights, LayoutError)
    assert not isinstance(error, CoverageError)
    assert error.names == ("experts.1.w3.weight",)


def test_an_empty_manifest_is_refused_unless_allowed():
    model = Toy({"w": zeros(2)})
    assert "nothing would be loaded" in str(refused(model, [], CoverageError))
    assert "nothing would be loaded" in str(refused(model, [], CoverageError, scope="partial"))
    assert plan_for(model, [], scope="partial", allow_empty=True).writes == ()


def test_partial_scope_leaves_out_what_it_likes_but_refuses_the_rest():
    model = Toy({"a": zeros(2), "b": zeros(2)})
    assert treatments(plan_for(model, sent(a=(2,)), scope="partial")) == {"a": "copy"}
    assert refused(model, sent(a=(2,), nobody=(1,)), CoverageError, scope="partial").unexpected == ("nobody",)


def test_padding_is_allowed_under_the_parameters_own_name_only():
    rule = into("w", lambda p: p[:5])
    model = Toy({"w": zeros(8, 2)}, {"w": rule, "x": rule})
    assert plan_for(model, sent(w=(5, 2))).coverage.padding == (("w", 3 * 2 * 4),)
    assert refused(model, sent(x=(5, 2)), CoverageError).missing == ("w[5:8]",)


@pytest.mark.parametrize(("declared", "fits"), [(10, True), (0, False), (8, False), (16, False)])
def test_a_declared_number_of_elements_is_exact(declared, fits):
    model = Toy({"w": zeros(8, 2), "derived": zeros(3)}, {"x": into("w", lambda p: p[:5])})
    model.w.weight_loader_numel, model.derived.weight_loader_numel = declared, 0
    if fits:
        plan = plan_for(model, sent(x=(5, 2)))
        assert plan.coverage.derived == ("derived",)
    else:
        assert refused(model, sent(x=(5, 2)), LayoutError).names == ("w",)


def test_missing_experts_are_named():
    weights = [(n, t) for n, t in expert_weights() if n not in ("experts.2.w3.weight", "experts.1.w2.weight")]
    error = refused(MoE(num_local=4), weights, CoverageError)
    assert set(error.missing) == {"experts.2.w3.weight", "experts.1.w2.weight"}


def test_a_missing_layer_is_named_after_its_siblings():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(MoE(num_local=2) for _ in range(3))

        def load_weights(self, weights):
            for name, tensor in weights:
                _, layer, rest = name.split(".", 2)
                self.layers[int(layer)].load_weights([(rest, tensor)])

    weights = [(f"layers.{layer}.{n}", t) for layer in range(3) for n, t in expert_weights(2)]
    gone = {"layers.1.experts.0.w1.weight", "layers.1.experts.1.w3.weight", "layers.2.experts.1.w2.weight"}
    error = refused(Layers(), [(n, t) for n, t in weights if n not in gone], CoverageError)
    assert set(error.missing) == gone
    gone = {n for n, _ in weights if n.startswith("layers.2.")}
    error = refused(Layers(), [(n, t) for n, t in weights if n not in gone], CoverageError)
    assert set(error.missing) == gone


def test_unknown_options_are_errors():
    for option in ({"mode": "sideways"}, {"scope": "some"}, {"casts": "maybe"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be one of"):
            plan_reload(Toy({"w": zeros(2)}), Manifest.from_tensors(sent(w=(2,))), **option)


def test_a_loader_that_fails_all_the_time_is_given_up_on_and_says_how_much_was_left():
    model = Toy({"w": zeros(2)})
    weights = [(f"bad{i}", wire_tensor((1,))) for i in range(300)] + sent(w=(2,))
    error = refused(model, weights, LayoutError, scope="partial")
    assert "101 names were not examined: bad200" in str(error)
    assert len(error.unexpected) == 200


def test_a_loader_that_stops_asking_leaves_the_rest_unexpected():
    class Stops(Toy):
        def load_weights(self, weights):
            _, tensor = next(iter(weights))
            self.w.data.copy_(tensor)

    error = refused(Stops({"w": zeros(2), "v": zeros(2)}), sent(w=(2,), v=(2,)), CoverageError)
    assert (error.unexpected, error.missing) == (("v",), ("v",))


def test_names_that_do_not_fit_are_not_called_an_incomplete_load():
    words = str(refused(Toy({"a": zeros(2)}), sent(a=(2,), zzz=(2,)), CoverageError))
    assert words.startswith("1 names do not fit the model (zzz: the loader raised ")
    assert "not complete" not in words
    words = str(refused(Toy({"a": zeros(2)}), sent(zzz=(2,)), CoverageError))
    assert words.startswith("the load is not complete; 1 names do not fit the model (zzz: ")


def test_a_part_of_a_tensor_is_told_with_the_whole_layout():
    model = Toy({"w": zeros(4, 2)}, {"w": lambda m, t: m.w.data[:2].copy_(t)})
    words = str(refused(model, sent(w=(3, 2)), LayoutError))
    assert "expected float32[2, 2] for a part of w float32[4, 2], got float32[3, 2]" in words
