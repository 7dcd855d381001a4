"""compat/jsonargparse_errors.py: what each kind of error of the parser says, as data."""

import dataclasses
from abc import ABC, abstractmethod
from types import SimpleNamespace

import pytest
from jsonargparse import ArgumentParser

from sagemaker_lightning.compat import jsonargparse_errors
from sagemaker_lightning.compat.jsonargparse_errors import (
    LackingFlag,
    LackingSettings,
    Mistake,
    NoSettings,
    SettingOfNoClass,
    UnknownFlag,
    UnknownSetting,
    WrongClass,
    WrongValue,
)


class Animal(ABC):
    @abstractmethod
    def speak(self) -> str:
        """Say something."""


class Plant:
    pass


class Dog(Animal):
    speak = str

    def __init__(self, legs: int = 4, name: str | None = None) -> None:
        pass


class Fish(Animal):
    speak = str

    def __init__(self, fins: int) -> None:
        pass


class Owner:
    def __init__(self, age: int | None = 3, sizes: tuple[int, int] = (1, 2)) -> None:
        pass


HERE = f"{__name__}."
ANIMAL = (f"{HERE}Animal",)


def parser() -> ArgumentParser:
    made = ArgumentParser(exit_on_error=False)
    made.add_argument("--animal", type=Animal | None)
    made.add_argument("--plant", type=Plant | None)
    made.add_class_arguments(Owner, "owner")
    made.add_argument("--needed", type=int, required=True)
    return made


def mistake_in(*flags: str, needed: str = "--needed=1") -> Mistake:
    with pytest.raises(Exception, match=".") as raised:
        parser().parse_args([*filter(None, [needed]), *flags])
    return jsonargparse_errors.read(raised.value)


READ = [
    (["--zzz=1"], UnknownFlag, {"flag": "--zzz"}),
    (["--owner", "age=1"], NoSettings, {"flag": "--owner", "found": "age=1"}),
    (["--zzz", "age=1"], UnknownFlag, {"flag": "--zzz age"}),
    (["--owner=5"], NoSettings, {"flag": "--owner", "found": "5"}),
    (["--owner={zzz: 1}"], UnknownFlag, {"flag": "--owner.zzz"}),
    (
        ["--owner.age=x"],
        WrongValue,
        {"flag": "--owner.age", "found": "x", "allowed": ("int", "null")},
    ),
    (
        ["--owner.sizes=[1,2,3]"],
        WrongValue,
        {"flag": "--owner.sizes", "allowed": ("tuple with 2 elements",)},
    ),
    (["--animal=Cat"], WrongClass, {"flag": "--animal", "found": "Cat", "bases": ANIMAL}),
    (
        ["--animal=json.JSONDecoder"],
        WrongClass,
        {"flag": "--animal", "found": "json.JSONDecoder", "bases": ANIMAL},
    ),
    (
        ["--animal.legs=3"],
        SettingOfNoClass,
        {"flag": "--animal", "setting": "legs", "bases": ANIMAL},
    ),
    (  # a class that is not abstract is the default one
        ["--plant.leaves=3"],
        UnknownSetting,
        {"flag": "--plant", "setting": "leaves", "owner": f"{HERE}Plant"},
    ),
    (
        ["--animal=Dog", "--animal.zzz=3"],
        UnknownSetting,
        {"flag": "--animal", "setting": "zzz", "owner": f"{HERE}Dog", "bases": ANIMAL},
    ),
    (
        ["--animal=Fish"],
        LackingSettings,
        {"flag": "--animal", "owner": f"{HERE}Fish", "settings": ("fins",), "is_lacking": True},
    ),
    (
        ["--animal=Dog", "--animal.legs=x"],
        WrongValue,
        {"flag": "--animal.legs", "found": "x", "allowed": ("int",)},
    ),
]


@pytest.mark.parametrize(
    ("flags", "kind", "values"), READ, ids=[" ".join(flags) for flags, *_ in READ]
)
def test_an_error_of_the_parser_is_read(flags, kind, values):
    mistake = mistake_in(*flags)
    assert type(mistake) is kind, mistake
    assert {"is_lacking": False} | values == {
        name: value
        for name, value in dataclasses.asdict(mistake).items()
        if name in ("is_lacking", *values)
    }


def test_a_flag_that_is_needed_is_read():
    mistake = mistake_in(needed="")
    assert (type(mistake), mistake.flag, mistake.is_lacking) == (LackingFlag, "--needed", True)


def test_an_error_that_says_nothing_we_know_is_one_line():
    error = TypeError('Parser key "owner.age":\n  no\n   luck')
    assert jsonargparse_errors.read(error) == Mistake("--owner.age", "--owner.age: no luck", False)
    assert jsonargparse_errors.read(ValueError("argument --x: no")).text == "--x: no"


def test_the_settings_are_not_printed_after_an_error(capsys):
    with_config = ArgumentParser(exit_on_error=False)
    with_config.add_argument("--config", action="config")
    with_config.add_argument("--size", type=int)
    with pytest.raises(Exception, match="Expected"):
        with_config.parse_args(["--print_config", "--size=x"])
    jsonargparse_errors.print_no_config(with_config)
    assert with_config.parse_args(["--size=1"]).size == 1
    assert not capsys.readouterr().out


def frames(*names: str) -> list[tuple]:
    """Return stand-ins of the frames of modules with these names."""
    return [(SimpleNamespace(f_globals={"__name__": name}), 1) for name in names]


@pytest.mark.parametrize(
    ("names", "is_raised"),
    [
        (["mine", "jsonargparse._core"], True),
        (["jsonargparse._core", "mine"], False),
        (["jsonargparse_of_mine"], False),
    ],
)
def test_whether_the_parser_raised_an_error(names, is_raised):
    assert jsonargparse_errors._raised_by_the_parser(frames(*names)) == is_raised


def test_an_error_that_the_parser_has_wrapped_is_found():
    class Refuses:
        def __init__(self, size: int = 1) -> None:
            raise ValueError("no luck")

    refusing = ArgumentParser(exit_on_error=False)
    refusing.add_class_arguments(Refuses, "refuses")
    with pytest.raises(Exception, match="no luck") as raised:
        refusing.instantiate(refusing.parse_args([]))
    error, frames = jsonargparse_errors.unwrapped(raised.value)
    assert type(error) is ValueError and str(error) == "no luck"
    assert frames[-1][0].f_code is Refuses.__init__.__code__
