"""The feature matrix: what it promises is consistent, and what it does not promise is refused with a way out."""

import pytest
import torch

from megamoe_adapter import formats
from megamoe_adapter.formats import CONVERSIONS, FORMATS, REFUSED_SOURCES, SOURCES, Conversion, ScaleStorage, conversion


def test_every_format_and_every_source_is_used():
    assert {source for source, _ in CONVERSIONS} == set(SOURCES)
    assert {fmt for _, fmt in CONVERSIONS} == set(FORMATS)
    assert not set(SOURCES) & set(REFUSED_SOURCES)


def test_the_drawn_matrix_is_the_table():
    lines = (formats.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["source"])
    sources = lines[start].split()[1:]
    drawn = {}
    for line in lines[start + 2 : start + 2 + len(FORMATS)]:
        fmt, *cells = line.split()
        drawn |= {(source, fmt): cell for source, cell in zip(sources, cells, strict=True) if cell != "-"}
    assert drawn == {pair: kind.value for pair, kind in CONVERSIONS.items()}


def test_a_copy_keeps_dtype_packing_and_scale_group():
    for (source_name, fmt_name), kind in CONVERSIONS.items():
        source, fmt = SOURCES[source_name], FORMATS[fmt_name]
        if kind is not Conversion.COPY:
            continue
        assert source.values_per_element == fmt.values_per_element
        assert fmt.weight_dtype in source.weight_dtypes
        assert (fmt.scale is None) == (source.scale_group is None)
        if fmt.scale is not None:
            assert fmt.scale.group == source.scale_group
            assert fmt.scale.dtype in source.scale_dtypes


def test_an_expansion_starts_from_a_coarser_or_narrower_power_of_two_scale():
    for (source_name, fmt_name), kind in CONVERSIONS.items():
        if kind is Conversion.EXPAND:
            group, fine = SOURCES[source_name].scale_group, FORMATS[fmt_name].scale.group
            assert all(coarse % size == 0 for coarse, size in zip(group, fine, strict=True))
            assert torch.float8_e8m0fnu in SOURCES[source_name].scale_dtypes


def test_recipe_and_packing_agree_with_the_scale():
    for fmt in FORMATS.values():
        if fmt.scale is None:
            assert fmt.recipe is None
        elif fmt.scale.storage is ScaleStorage.PACKED:
            assert fmt.scale.dtype.itemsize == 1
            assert fmt.recipe == (1, 1, fmt.scale.group[1])
        else:
            assert fmt.recipe == (128, *fmt.scale.group)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", [*SOURCES, *REFUSED_SOURCES])
def test_every_other_pair_is_refused_with_reason_and_nearest_choice(source, fmt):
    if (source, fmt) in CONVERSIONS:
        assert conversion(source, fmt) is CONVERSIONS[source, fmt]
        return
    with pytest.raises(NotImplementedError, match=f"{source} cannot be loaded into {fmt}.*nearest supported choice: "):
        conversion(source, fmt)


def test_compressed_tensors_nvfp4_is_called_lossy():
    with pytest.raises(NotImplementedError, match=r"lossy.*mxfp4_ct.*nvfp4_modelopt"):
        conversion("nvfp4_ct", "sm100_mxfp4")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown MegaMoE format 'sm80'.*sm100_mxfp4"):
        conversion("bf16", "sm80")
    with pytest.raises(ValueError, match=r"unknown checkpoint source 'gguf'.*block_fp8"):
        conversion("gguf", "sm100_bf16")
