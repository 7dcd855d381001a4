"""A sharded model's whole weights, in files of a bounded size."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from pages import FENCE, PAGES
from safetensors import safe_open
from safetensors.torch import load_file

from sagemaker_lightning.cli import safetensors_files
from sagemaker_lightning.compat import dtensors


@pytest.fixture
def network() -> torch.nn.Module:
    """A network whose weights have 64, 16, 64, 16 and 64 bytes; the last is the first."""
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)]
    layers[2].weight = layers[0].weight
    return torch.nn.Sequential(*layers)


def test_a_file_has_as_many_weights_as_have_room(network):
    def parts(file_bytes: int) -> list[list[str]]:
        return safetensors_files.parts(network.state_dict(), file_bytes)

    first, second, third = ["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight"]
    assert parts(80) == [first, second, third]
    assert parts(160) == [[*first, *second], third]
    # A weight that is larger than a file has a file of its own.
    assert parts(1) == [["0.weight"], ["0.bias"], ["1.weight"], ["1.bias"], third]
    assert safetensors_files.size(network.state_dict()) == 224


def test_the_lines_of_the_page_load_the_files(tmp_path: Path, network, monkeypatch):
    safetensors_files.write(tmp_path / "output/model", network.state_dict(), True, 80)
    loaded = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=n < 2) for n in range(3)))
    (lines,) = (text for _, text in FENCE.findall(PAGES["docs/sharded.md"]) if "load_file" in text)
    monkeypatch.chdir(tmp_path)
    exec(lines, {"network": loaded})
    for name, weight in network.state_dict().items():
        assert loaded.state_dict()[name].equal(weight)


def test_the_index_is_as_others_write_it(tmp_path: Path, network):
    safetensors_files.write(tmp_path, network.state_dict(), True, 160)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 224},
        "weight_map": dict.fromkeys(["0.weight", "0.bias", "1.weight", "1.bias"], names[0])
        | {"2.weight": names[1]},
    }
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    with safe_open(tmp_path / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_only_the_weights_of_one_file_are_whole_at_a_time(tmp_path: Path, network, monkeypatch):
    gathered = []

    def whole(weights, keeps):
        assert not any(reference() is not None for reference in gathered)
        copies = {name: weight.clone() for name, weight in weights.items()}
        gathered.extend(map(weakref.ref, copies.values()))
        return copies

    def save(weights, **options):
        gathered.extend(map(weakref.ref, weights.values()))  # they may be copies of those
        return b""

    monkeypatch.setattr(dtensors, "whole", whole)
    monkeypatch.setattr(safetensors_files, "save", save)
    safetensors_files.write(tmp_path, network.state_dict(), True, 80)
    assert len(gathered) == 10


def test_an_earlier_program_s_files_are_replaced_when_all_are_written(
    tmp_path: Path, network, monkeypatch
):
    safetensors_files.write(tmp_path, network.state_dict(), True, 80)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def save(weights, metadata):
        calls.append(weights)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return b""

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_files, "save", save)
        with pytest.raises(OSError, match="No space left"):
            safetensors_files.write(tmp_path, network.state_dict(), True, 160)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "model-00001-of-00002.safetensors.killed.sagemaker-ignore").touch()
    safetensors_files.write(tmp_path, network.state_dict(), True, 160)
    assert len(list(tmp_path.iterdir())) == 3
    weights = load_file(tmp_path / "model-00002-of-00002.safetensors")
    assert weights["2.weight"].equal(network[2].weight)
    safetensors_files.remove(tmp_path)
    assert not list(tmp_path.iterdir())
