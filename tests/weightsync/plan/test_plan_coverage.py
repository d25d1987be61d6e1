"""The proof counts bytes by identity and region: gaps, double writes, padding, at any granule, in linear time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.plan.coverage import is_own_name, prove
from weightsync.plan.regions import Region
from weightsync.plan.tally import Tally, is_covered, overlaps, repeats_itself
from weightsync.plan.writes import Claim, Destination


def destination(path="w", shape=(8, 4), kind="parameter", storage=0, numel=None, aliases=(), base=None):
    tensor = torch.zeros(shape) if base is None else base
    return Destination(path, aliases, "", kind, tuple(tensor.shape), tensor.dtype, Region.of(tensor), storage, numel)


def claim(view, *names, index=0):
    return Claim(names, index, Region.of(view), None)


def test_exact_tiles_are_complete_in_any_order():
    base = torch.zeros(8, 4)
    tiles = [claim(base[0:3], "a"), claim(base[3:8, 0:2], "b"), claim(base[3:8, 2:4], "c")]
    for order in (tiles, tiles[::-1], [tiles[1], tiles[2], tiles[0]]):
        coverage = prove([destination()], order)
        assert (coverage.missing, coverage.duplicated) == ((), ())
        assert coverage.written_bytes == 8 * 4 * 4


def test_one_element_short_is_missing_and_one_too_many_is_duplicated():
    base = torch.zeros(8, 4)
    short = prove([destination()], [claim(base[0:7], "a"), claim(base[7, 0:3], "b")])
    assert short.missing == ("w[elements 31:32]",)
    assert short.duplicated == ()
    many = prove([destination()], [claim(base[0:7], "a"), claim(base[7], "b"), claim(base[0, 0:1], "c")])
    assert many.missing == ()
    assert set(many.duplicated) == {"a", "c"}


def test_many_gaps_of_one_parameter_are_summed_up():
    base = torch.zeros(32, 4)
    assert prove([destination(base=base)], [claim(base[::2], "a")]).missing == ("w[256 of 512 bytes, in 16 places]",)
    assert prove([destination(base=base)], [claim(base[::8], "a")]).missing == tuple(
        f"w[{row + 1}:{row + 8}]" for row in range(0, 32, 8)
    )


def test_the_right_number_of_bytes_in_the_wrong_place_is_not_complete():
    base = torch.zeros(8, 4)
    coverage = prove([destination()], [claim(base[0:4], "a"), claim(base[2:6], "b")])
    assert coverage.missing == ("w[6:8]",)
    assert set(coverage.duplicated) == {"a", "b"}


def test_shared_storage_is_counted_once():
    flat = torch.zeros(32)
    both = [destination("w", base=flat[:16]), destination("v", base=flat[8:])]
    coverage = prove(both, [claim(flat[:16], "a"), claim(flat[16:], "b", index=1)])
    assert coverage.missing == ()
    assert coverage.written_bytes == 128
    overlapping = prove(both, [claim(flat[:16], "a"), claim(flat[8:], "b", index=1)])
    assert set(overlapping.duplicated) == {"a", "b"}


def test_buffers_need_no_source_but_take_no_two():
    table = destination("table", (4,), kind="buffer")
    assert prove([table], []).missing == ()
    assert prove([table], []).untouched == ("table",)
    base = torch.zeros(4)
    assert set(prove([table], [claim(base, "a"), claim(base[1:2], "b")]).duplicated) == {"a", "b"}


def test_writes_that_share_a_name_are_no_duplicates():
    base = torch.zeros(8, 4)
    coverage = prove([destination()], [claim(base, "a"), claim(base, "a", "b"), claim(base[2], "a")])
    assert (coverage.missing, coverage.duplicated) == ((), ())


@pytest.mark.parametrize(("numel", "rows", "fits"), [(12, 3, True), (12, 4, False), (12, 2, False), (0, 1, False)])
def test_a_declared_numel_is_exact(numel, rows, fits):
    base = torch.zeros(8, 4)
    coverage = prove([destination(numel=numel)], [claim(base[:rows], "a")])
    assert coverage.missing == ()
    assert (coverage.wrong_numel == ()) is fits


def test_a_partial_scope_accepts_fewer_than_declared_but_not_more():
    base = torch.zeros(8, 4)
    assert prove([destination(numel=12)], [], scope="partial").wrong_numel == ()
    assert prove([destination(numel=12)], [claim(base, "a")], scope="partial").wrong_numel == (("w", 12, 32),)


def test_padding_needs_a_single_source_of_the_same_name():
    base = torch.zeros(8, 4)
    assert prove([destination("m.w")], [claim(base[:5], "m.w")]).padding == (("m.w", 3 * 4 * 4),)
    assert prove([destination("m.w")], [claim(base[:5], "prefix.m.w")]).missing == ()
    assert prove([destination("m.w")], [claim(base[:5], "m.wide")]).missing == ("m.w[5:8]",)
    two = [claim(base[:5], "m.w"), claim(base[5:6], "x")]
    assert prove([destination("m.w")], two).missing == ("m.w[6:8]",)


def test_own_names_are_compared_by_component():
    assert is_own_name("model.w", destination("w"))
    assert is_own_name("w", destination("model.w"))
    assert is_own_name("head", destination("embed", aliases=("head",)))
    assert not is_own_name("raw", destination("w"))
    assert not is_own_name("model.draw", destination("raw"))


def test_an_empty_parameter_is_complete():
    assert prove([destination(shape=(0, 4))], []).missing == ()


def test_a_wide_scatter_takes_no_entry_per_byte():
    base = torch.zeros(1 << 16, 64, dtype=torch.uint8)
    tally = Tally.of([Region.of(base[:, :32]), Region.of(base[:, 32:])])
    assert tally.granule == 32
    assert len(tally.counts) == 1 << 17
    assert (tally.counts == 1).all()


VIEWS = st.tuples(
    st.integers(0, 5), st.integers(1, 6), st.integers(0, 5), st.integers(1, 6), st.integers(1, 3), st.booleans()
)


def view_of(base, spec):
    row, rows, column, columns, step, flipped = spec
    view = base[row : row + rows : step, column : column + columns]
    return view.t() if flipped else view


@settings(max_examples=200, deadline=None)
@given(specs=st.lists(VIEWS, min_size=1, max_size=5))
def test_the_proof_agrees_with_counting_every_element(specs):
    base = torch.zeros(6, 6, dtype=torch.float16)
    counts, hits = torch.zeros(6, 6, dtype=torch.int64), []
    for spec in specs:
        view_of(counts, spec).add_(1)
        hits.append(view_of(torch.zeros(6, 6, dtype=torch.bool), spec))
    claims = [claim(view_of(base, spec), f"n{chr(97 + i)}") for i, spec in enumerate(specs)]
    coverage = prove([destination(base=base)], claims)
    assert coverage.written_bytes == 2 * int((counts > 0).sum())
    assert bool(coverage.missing) == bool((counts == 0).any())
    expected = {c.names[0] for c, spec in zip(claims, specs, strict=True) if bool((view_of(counts, spec) > 1).any())}
    assert set(coverage.duplicated) == expected
    for left, first in zip(claims, specs, strict=True):
        others = [c.region for c in claims if c is not left]
        is_shared = torch.zeros(6, 6, dtype=torch.int64)
        for other, spec in zip(claims, specs, strict=True):
            if other is not left:
                view_of(is_shared, spec).fill_(1)
        if others:
            assert is_covered(left.region, others) == bool(view_of(is_shared, first).all())
        mine = torch.zeros(6, 6, dtype=torch.int64)
        view_of(mine, first).fill_(1)
        for other, spec in zip(claims, specs, strict=True):
            theirs = torch.zeros(6, 6, dtype=torch.int64)
            view_of(theirs, spec).fill_(1)
            assert overlaps(left.region, other.region) == bool((mine * theirs).any())


def test_views_that_name_a_byte_twice_are_known():
    base = torch.zeros(24)
    assert repeats_itself(Region.of(base.expand(2, 24)))
    assert repeats_itself(Region.of(base.as_strided((4, 4), (2, 1))))
    assert not repeats_itself(Region.of(base.as_strided((3, 4), (8, 2))))
    assert not repeats_itself(Region.of(base.as_strided((2, 3, 4), (1, 8, 2))))
    assert not repeats_itself(Region.of(base.view(4, 6).t()))
    assert not repeats_itself(Region.of(base[:0]))
