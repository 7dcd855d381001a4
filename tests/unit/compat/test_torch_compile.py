"""compat/torch_compile.py: the kernel for a shape does not depend on earlier shapes."""

import json
import os
from pathlib import Path

import pytest
import warm
from containers import ROOT

PROGRAM = """
import json
import torch
from sagemaker_lightning.compat.torch_compile import compile_each_shape

made = []

def backend(graph, inputs):
    made.append([list(map(str, one.shape)) for one in inputs if isinstance(one, torch.Tensor)])
    return graph

{prepare}
function = torch.compile(lambda values, times: values.sum() * times, backend=backend)
for size in [12, 12, 4, 12, 7]:
    function(torch.rand(size), 1)
shapes = [one[0] for one in made]
for times in range(2, 9):
    function(torch.rand(12), times)
print(json.dumps([shapes, len(made) - len(shapes)]))
"""


def graphs(folder: Path, prepare: str) -> tuple[list, int]:
    """Return the shapes that have graphs, and how many more graphs other numbers need."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    run = warm.run(["python", "-c", PROGRAM.format(prepare=prepare)], folder, variables)
    assert run.returncode == 0, run.stdout
    return tuple(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_each_shape_has_a_kernel_of_its_own(tmp_path: Path):
    """Numbers that change with each step do not have one."""
    shapes, shapes_compiled_twice = graphs(
        tmp_path, "context = compile_each_shape(); context.__enter__()"
    )
    assert shapes == [["12"], ["4"], ["7"]] and shapes_compiled_twice <= 2


@pytest.mark.slow
def test_torchs_own_choice_depends_on_what_came_before(tmp_path: Path):
    # The second graph serves 7, too, and 12 from then on.
    assert graphs(tmp_path, "")[0] == [["12"], ["4"]]
