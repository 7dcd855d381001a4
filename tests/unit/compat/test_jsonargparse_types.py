"""compat/jsonargparse_types.py: a whole number stays one."""

from jsonargparse import _typehints

from sagemaker_lightning.compat import jsonargparse_types


def test_int_comes_before_float_and_all_else_stays():
    for types_before, types_after in (
        ([str, float, bool, int], [str, int, float, bool]),
        ([int, str, float], [int, str, float]),
        ([float, str], [float, str]),
        ([str, int], [str, int]),
        ([], []),
    ):
        assert jsonargparse_types.int_before_float(types_before) == types_after


def test_jsonargparse_tries_int_first_once_whole_numbers_are_kept(monkeypatch):
    monkeypatch.setattr(_typehints, "sort_subtypes_for_union", lambda types, **_: types)
    jsonargparse_types.keep_whole_numbers()
    sort = _typehints.sort_subtypes_for_union
    assert sort([str, float, int], append=False) == [str, int, float]
    jsonargparse_types.keep_whole_numbers()
    assert _typehints.sort_subtypes_for_union is sort
