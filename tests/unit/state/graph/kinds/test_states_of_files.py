"""state/graph/kinds/states.py: files that training reads continue where they were."""

import pytest
from graph_records import Thing, train

from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.kinds.states import is_read
from sagemaker_lightning.state.graph.start import Start

LINES = "1é\n22\n333\n4444\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows"
    path.write_text(LINES, "utf-8")
    return path


@pytest.mark.parametrize("options", [{}, {"mode": "rb"}, {"mode": "rb", "buffering": 0}])
def test_a_file_that_is_read_continues_where_it_was(path, options):
    def change(model):
        model.file.readline()
        model.file.readline()

    trained, resumed = train(lambda: Thing(file=path.open(**options)), change)
    with trained.file, resumed.file:
        assert resumed.file.readline() == trained.file.readline()
        assert resumed.file.read() == trained.file.read()


def test_a_file_that_training_has_closed_is_closed(path):
    trained, resumed = train(lambda: Thing(file=path.open()), lambda model: model.file.close())
    assert trained.file.closed and resumed.file.closed


def test_the_place_of_a_file_whose_lines_a_loop_takes_is_not_saved(path):
    with path.open() as file:
        thing = Thing(file=file)
        start = Start({"model": thing})
        next(file)
        _, unsaved, *_ = encode({"model": thing}, start)
        assert [each.kind for each in unsaved] == ["_io.TextIOWrapper"]


def test_a_file_that_has_given_its_buffer_away_is_not_asked(path):
    file = path.open()
    with file.detach():
        assert not is_read(file)


def test_a_loop_that_takes_lines_is_left_alone(path):
    with path.open() as file:
        start = Start({"data": Thing(file=file)}, is_kept=True)
        lines = iter(file)
        next(lines)
        start.reset()
        assert next(lines) == "22\n"


def test_a_file_that_training_opens_is_not_saved(path):
    """A checkpoint names no file."""
    thing = Thing(file=None)
    start = Start({"model": thing})
    with path.open() as file:
        thing.file = file
        _, unsaved, *_ = encode({"model": thing}, start)
    assert [each.name for each in unsaved] == ["file"]
