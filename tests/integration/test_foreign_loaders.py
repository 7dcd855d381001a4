"""The examination of other libraries' loaders (results/loaders.md), without any of them."""

import ast
import random

import pytest
import real_projects
from containers import ROOT

from tests.foreign_loaders import __main__ as examination


@pytest.mark.parametrize(
    "script", sorted(examination.LIBRARIES.glob("*.py")), ids=lambda it: it.stem
)
def test_each_library_is_named_with_its_version_and_its_loaders(script):
    (requirement,) = real_projects.requirements(script)
    assert "==" in requirement
    (table,) = [
        node.value
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "LOADERS"
    ]
    names = [key.value for key in table.keys]
    assert len(names) > 1 and examination.names_of(script.stem) == names


def test_two_moments_are_within_an_epoch_and_one_at_an_edge():
    order = {"begin": -1, "end": 99}
    for seed in range(50):
        drawn = examination.moments(random.Random(seed), [10, 10, 10])
        places = [moment.split(":")[:2] for moment in drawn]
        at = [(int(epoch), order.get(batch) or int(batch)) for epoch, batch in places]
        assert at == sorted(at) and len(set(at)) == 3
        assert sum(batch in (-1, 9, 99) for _, batch in at) == 1


def test_a_step_with_another_batch_is_a_difference(tmp_path):
    for name, first in (("alone", 1.0), ("run", 2.0)):
        (tmp_path / name).mkdir()
        line = f'{{"step": 0, "epoch": 0, "batch": 0, "first": [{first}]}}'
        (tmp_path / name / "seen.jsonl").write_text(f"{line}\n")
    says = examination.difference(tmp_path / "alone", tmp_path / "run")
    assert says == "step 0 had (0, 0, [2.0]), not (0, 0, [1.0])"


def test_the_page_has_a_place_for_the_table():
    page = (ROOT / "results/loaders.md").read_text()
    report = {"version": "timm 1", "name": "a loader", "ways": {"0": [{"outcome": "identical"}]}}
    text = real_projects.with_table(page, examination.table([report]), examination.BEGIN)
    assert "| a loader | 1 identical |  |  |  |" in text
