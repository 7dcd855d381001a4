"""cli/flags.py: a command line and a file of flags are split into their settings."""

import pytest
import yaml
from command_lines import no_flags_of_pytest  # noqa: F401  a fixture for each test

from sagemaker_lightning.cli import flags

OWN = (
    "seed_everything: 3\ntrainer: {max_epochs: 5}\nmodel: null\n"
    "data: {class_path: x.Y, init_args: {shares: [1, 2]}}\n"
)
GIVEN = [
    (["--a", "-1", "--b=2", "--c"], [("--a", ["--a", "-1"]), ("--b", ["--b=2"]), ("--c", ["--c"])]),
    (["--a", "1", "stray"], [("--a", ["--a", "1"]), ("stray", ["stray"])]),
    (["--a", "-.5", "-x"], [("--a", ["--a", "-.5"]), ("-x", ["-x"])]),
    (["--trainer.callbacks+=X"], [("--trainer.callbacks", ["--trainer.callbacks+=X"])]),
    (["--data.init_args.size=3"], [("--data.size", ["--data.init_args.size=3"])]),
    (["--data.class_path", "x.Y"], [("--data", ["--data.class_path", "x.Y"])]),
    (["--help", "-h", "--print_config", "--model.help=X"], []),
    (
        ["--trainer", "{max_epochs: 3, zzz: null, name: x}"],
        [
            ("--trainer.max_epochs", ["--trainer.max_epochs=3"]),
            ("--trainer.zzz", ["--trainer.zzz=null"]),
            ("--trainer.name", ["--trainer.name=x"]),
        ],
    ),
    (
        ["--data={class_path: x.Y, init_args: {size: 3}}"],
        [("--data", ["--data=x.Y"]), ("--data.size", ["--data.size=3"])],
    ),
    (["--data={init_args: {size: 3}}"], [("--data.size", ["--data.size=3"])]),
    (["--data={class_path: x.Y, init_args: null}"], [("--data", ["--data=x.Y"])]),
    (
        ["--data={class_path: x.Y, size: 3}"],
        [("--data.class_path", ["--data.class_path=x.Y"]), ("--data.size", ["--data.size=3"])],
    ),
    (["--trainer={}"], [("--trainer", ["--trainer={}"])]),
    (["--trainer={broken"], [("--trainer", ["--trainer={broken"])]),
    (["--logger.name={x: 1}"], [("--logger.name", ["--logger.name={x: 1}"])]),
    (["--config=none.yaml"], [("--config", ["--config=none.yaml"])]),
]


@pytest.mark.parametrize(("args", "expected"), GIVEN, ids=[" ".join(args) for args, _ in GIVEN])
def test_a_command_line_is_split_into_its_settings(args, expected):
    assert list(flags.given(args)) == [(flag, words, "") for flag, words in expected]


@pytest.mark.parametrize("args", [["--config=own.yaml"], ["--config", "own.yaml"]])
def test_a_file_of_flags_is_split_into_its_settings(args, tmp_path):
    (tmp_path / "own.yaml").write_text(OWN)
    assert list(flags.given(args)) == [
        (flag, [f"{flag}={value}"], " (in own.yaml)")
        for flag, value in (
            ("--seed_everything", "3"),
            ("--trainer.max_epochs", "5"),
            ("--data", "x.Y"),
            ("--data.shares", "[1, 2]"),
        )
    ]


def test_a_configuration_is_made_flat():
    assert dict(flags.flat({**yaml.safe_load(OWN), "optimizer": {}})) == {
        "--seed_everything": 3,
        "--trainer.max_epochs": 5,
        "--model": None,
        "--data": "x.Y",
        "--data.shares": [1, 2],
        "--optimizer": {},
    }


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--config=fast"], ["--config=/r/fast.yaml"]),
        (["--config", "fast", "fast"], ["--config", "/r/fast.yaml", "fast"]),
        (["--logger.name=fast", "--config=mine"], ["--logger.name=fast", "--config=mine"]),
        (["--config=", "--config"], ["--config=", "--config"]),
        (["--config=there", "--config", "there"], ["--config=there", "--config", "there"]),
    ],
)
def test_a_recipes_name_becomes_its_path_where_no_file_has_that_name(args, expected, tmp_path):
    (tmp_path / "there").touch()
    assert flags.recipes(args, {"fast": "/r/fast.yaml", "there": "/r/there.yaml"}) == expected
