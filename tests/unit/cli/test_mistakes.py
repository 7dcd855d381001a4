"""cli/mistakes.py: each mistake in flags, files and settings is one line."""

import fractions
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import (  # noqa: F401  fixtures
    cli,
    no_flags_of_pytest,
    parsed,
    refused,
    without_classes_of_tests,
)
from jsonargparse import Namespace
from lightning_fabric.utilities.exceptions import MisconfigurationException

from sagemaker_lightning.cli import mistakes
from sagemaker_lightning.contract.errors import UserError

from app.data import DigitsDataModule

MISTAKES = [
    (
        ["--trainer.max_epoch=5"],
        "--trainer.max_epoch: is not a flag here; did you mean --trainer.max_epochs?",
    ),
    (["--max_epochs=5"], "--max_epochs: is not a flag here; did you mean --trainer.max_epochs?"),
    (["nonsense"], "unrecognized arguments: nonsense|nonsense: is not a flag"),
    (["-k", "5"], "-k: is not a flag here"),
    (["--trainer.max_epochs=five"], "--trainer.max_epochs: found 'five', expected int or null"),
    (["--trainer.max_epochs"], "--trainer.max_epochs: expected one argument"),
    (["--trainer.precision=13"], "--trainer.precision: found '13', expected .*bf16-mixed"),
    (["--trainer.accelerator=quantum"], "--trainer.accelerator: found 'quantum', .*cpu"),
    (["--trainer.strategy=nope"], "--trainer.strategy: found 'nope', .*ddp"),
    (["--trainer.devices=0"], "--trainer.devices: found '0', .*cpu"),
    (
        ["--data=CIFAR11DataModule"],
        "--data: found 'CIFAR11DataModule', .*did you mean CIFAR10DataModule",
    ),
    (["--data=my.nope.Data"], "--data: found 'my.nope.Data' .No module named 'my'"),
    (
        ["--data=json.JSONDecoder"],
        "--data: found 'json.JSONDecoder'.*subclass of LightningDataModule",
    ),
    (["--data.batch_sizes=3"], "--data.batch_sizes: .*did you mean --data.batch_size?"),
    (["--data.batch_size=0"], "--data.batch_size: found 0, expected 1 or more"),
    (["--data.shuffle=maybe"], "--data.shuffle: found 'maybe', expected bool"),
    (
        ["--data=CIFAR10DataModule", "--data.val_split=abc"],
        "--data.val_split: found 'abc', expected int or float",
    ),
    (
        ["--model.num_classes=5"],
        "--model.num_classes: found 5, but DigitsDataModule has 10 classes",
    ),
    (["--model=ResNet19"], "--model: found 'ResNet19'.*did you mean ResNet18"),
    (["--optimizer=Adamm"], "--optimizer: found 'Adamm'.*did you mean Adam"),
    (
        ["--optimizer.lr=1"],
        "^--optimizer.lr: belongs to a class that is not given; give --optimizer=NAME as well$",
    ),
    (
        ["--trainer.logger.save_dir=x"],  # the class of all loggers is abstract
        "^--trainer.logger.save_dir: belongs to a class that is not given; give --trainer.logger=",
    ),
    (
        ["--optimizer.lrr=0.1"],
        r"^--optimizer.lrr: no Optimizer has such a setting; did you mean --optimizer.lr\? ",
    ),
    (
        ["--lr_scheduler.gama=0.1"],
        r"^--lr_scheduler.gama: no .*Scheduler.* has such a setting; did you mean .*gamma\? give",
    ),
    (
        ["--optimizer.zzzzz=1"],
        "^--optimizer.zzzzz: belongs to a class that is not given; give --op",
    ),
    (["--optimizer.class_path=Adamm"], "--optimizer: found 'Adamm'.*did you mean Adam?"),
    (
        ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=x"],
        "^--lr_scheduler.step_size: found 'x', expected int$",
    ),
    (["--model=null"], "^--model: is needed, and not given$"),
    (["--optimizer=Adam", "--optimizer.lr=abc"], "--optimizer.lr: found 'abc', expected float"),
    (
        ["--optimizer=Adam", "--optimizer.learning_rate=1"],
        "--optimizer.learning_rate: Adam has no such setting",
    ),
    (["--config=/nope.yaml"], "--config: .*nope.yaml"),
    (
        ["--lr_scheduler=StepLR"],
        "--lr_scheduler: StepLR needs step_size; give --lr_scheduler.step_size",
    ),
    (
        ["--trainer max_epochs=1"],
        "--trainer max_epochs: is not a flag here; did you mean --trainer.max_epochs?",
    ),
    (["--lr_scaling=linea"], "--lr_scaling: found 'linea', expected .*none.*linear.*sqrt"),
    (["--lr_scale=sqrt"], "--lr_scale: is not a flag here; did you mean --lr_scaling?"),
    (
        ["--system.every_n_seconds=often"],
        "--system.every_n_seconds: found 'often', expected float",
    ),
    (
        ["--data=DigitsDataModule", "--data.sharded=true"],
        "--data.sharded: DigitsDataModule has no such setting",
    ),
    (
        ["--data=DigitsDataModule", "--data.data_dir=x"],
        "--data.data_dir: DigitsDataModule has no such setting",
    ),
    (
        ["--progress.every_n_seconds=-1"],
        "--progress.every_n_seconds: found -1.0, expected 0 or more",
    ),
    (["--system.every_n_seconds=-1"], "--system.every_n_seconds: found -1.0, expected 0 or more"),
    (["--resume.every_n_minutes=-1"], "--resume.every_n_minutes: found -1.0, expected 0 or more"),
    (
        ["--resume.every_n_minutes=.nan"],
        "--resume.every_n_minutes: found nan, expected 0 or more",
    ),
    (
        ["--trainer.log_every_n_steps=-1"],
        "--trainer.log_every_n_steps: found -1, expected 0 or more",
    ),
    (
        ["--trainer.check_val_every_n_epoch=0"],
        "--trainer.check_val_every_n_epoch: found 0, expected 1 or more",
    ),
    (
        ["--trainer.val_check_interval=0"],
        "--trainer.val_check_interval: found 0, expected a number of batches",
    ),
    (
        ["--trainer.min_epochs=3", "--trainer.max_epochs=2"],
        "--trainer.min_epochs: found 3, and --trainer.max_epochs=2 ends the training before; give",
    ),
    (["--trainer.min_epochs=21"], "--trainer.min_epochs: found 21, and --trainer.max_epochs=20 "),
    (
        ["--trainer.min_steps=3", "--trainer.max_steps=2"],
        "--trainer.min_steps: found 3, and --trainer.max_steps=2 ends the training before; give",
    ),
    *(
        ([f"--checkpoint.filename={name}"], "--checkpoint.filename: found '[^']*', which is not a ")
        for name in ("{", "}", "{}", "{0}", "{val_loss:.3q}", "{val_loss:d}")
    ),
    (
        [f"--checkpoint.filename=a/{'x' * 3000}-{{epoch}}"],
        "--checkpoint.filename: found 'a/x*[.]{3}', which makes a name that no file can have, "
        "of 3013 ",
    ),
    (
        ["--trainer.val_check_interval=-1"],
        "--trainer.val_check_interval: found -1, which cannot be: .*",
    ),
    (
        ["--trainer.logger=MLFlowLogger", "--trainer.logger.tracking_uri=x"],
        "--trainer.logger: found MLFlowLogger, and mlflow is not installed here; name mlflow-s",
    ),
    (
        ["--trainer.logger=[WandbLogger,MLFlowLogger]"],
        "--trainer.logger: found WandbLogger, and wandb is .* build the image with LOGGERS=wandb",
    ),
    (["--checkpoint.mode=x"], "--checkpoint.mode: found 'x', which cannot be: `mode` can be m"),
    (
        ["--checkpoint.every_n_epochs=-1"],
        "--checkpoint.every_n_epochs: found -1, which cannot be: .*Must be >= 0",
    ),
    (
        ["--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=0"],
        "--lr_scheduler: ZeroDivisionError: .*; found step_size=0, gamma=0.1, last_epoch=-1$",
    ),
    (
        ["--optimizer=SGD", "--optimizer.lr=-1"],
        "--optimizer: Invalid learning rate: -1.0; found lr=-1.0, momentum=0.0",
    ),
    (
        [
            "--trainer.callbacks=EarlyStopping",
            "--trainer.callbacks.monitor=x",
            "--trainer.callbacks.mode=x",
        ],
        "--trainer.callbacks: `mode` can be min, max, got x",
    ),
    (
        ["--trainer.accumulate_grad_batches=0"],
        "--trainer.accumulate_grad_batches: found 0, expected 1 or more",
    ),
    (
        ["--trainer.gradient_clip_val=-1"],
        "--trainer.gradient_clip_val: found -1, expected 0 or more",
    ),
    (
        ["--trainer.num_sanity_val_steps=-2"],
        "--trainer.num_sanity_val_steps: found -2, expected -1 or more",
    ),
    (["--data.num_workers=-1"], "--data.num_workers: found -1, expected 0 or more"),
    (["--data=foreign.Data"], "^--model.num_classes: not given, and Data does not say how many"),
    (
        ["--hosts=a", "--model_dir=b"],
        "^--hosts, --model_dir: are not flags here; leave it out: it is taken from the job$",
    ),
    (
        ["--data.num_workers=1000000"],
        "--data.num_workers: found 1000000, expected at most [0-9]+ on this machine",
    ),
    (["--logger.flush_secs=often"], "--logger.flush_secs: found 'often', expected int"),
    (["--logger.flush_secs=0"], "--logger.flush_secs: found 0, expected 1 or more"),
    (["--data.batch_size=null"], "--data.batch_size: found null, expected a value"),
    (
        ["--data.batch_size=null", "--seed_everything=-1"],
        "^--seed_everything: found -1, .*; also --data.batch_size: found null, expected a value",
    ),
    (["--data.batch_size.x=1"], "^--data.batch_size: found '1', expected int$"),
    (
        ["--data={class_path: DigitsDataModule, batch_size: 3}"],
        "^--data: found class_path beside settings; put these into init_args$",
    ),
    (["--logger={name: {x: 1}}"], r"""^--logger.name: found "{'x': 1}", expected str$"""),
    (
        ["--optimizer=Adam", "--optimizer.betas=[1,2,3]"],
        "--optimizer.betas: found .*, expected tuple with 2 elements",
    ),
    (
        ["--optimizer=Adam", "--optimizer.zzz=1"],
        "--optimizer.zzz: Adam has no such setting; it has .*betas, eps",
    ),
    (
        ["--trainer.zzz=1"],
        "--trainer.zzz: is not a flag here; --trainer has accelerator, .*; see https://",
    ),
    (
        [""],
        "^an empty argument: is not a flag here; leave it out, or look at the variable that gave",
    ),
    (
        ["--zzz=1"],
        "^--zzz: is not a flag here; flags are --config, .*; in groups: --trainer, --model, "
        "--data, --logger, --checkpoint, --resume, --progress, --system, --divergence$",
    ),
    (
        ["--dirpath=x"],
        "--dirpath: is not a flag here; did you mean --checkpoint.dirpath or --resume.dirpath?",
    ),
    (["--batch-size=3"], "--batch-size: is not a flag here; did you mean --data.batch_size?"),
    (["--data=null"], "--data: found null, but ResNet18 has no train_dataloader of its own; leave"),
    (
        ["--seed_everything=-1"],
        "--seed_everything: found -1, expected 0 to 4294967295, true or false",
    ),
    (
        ["--trainer.max_steps=9223372036854775808"],
        "--trainer.max_steps: found 9223372036854775808, expected whole ",
    ),
    (
        ["--data.batch_size=-9223372036854775809"],
        "--data.batch_size: found -92.*09, expected whole numbers of 64",
    ),
    (["--resume.every_n_minutes=1" + "0" * 400], "--resume.every_n_minutes: .*too large"),
    (
        ["--seed_everything=4294967296"],
        "--seed_everything: found 4294967296, expected 0 to 4294967295",
    ),
    (["--trainer=5"], "--trainer: found '5', expected its settings: --trainer.NAME=VALUE"),
    (['--trainer={"max_epochs":3,"zzz":1}'], "--trainer.zzz: is not a flag here"),
    (
        ['--data={"class_path":"DigitsDataModule","init_args":{"batch_size":"x"}}'],
        "--data.batch_size: found 'x'",
    ),
    (["--trainer.callbacks=EarlyStopping"], "--trainer.callbacks: EarlyStopping needs monitor"),
    (
        ["--trainer.accelerator=ddp"],
        "--trainer.accelerator: found 'ddp'.*use --trainer.strategy=ddp",
    ),
    (["--zzz={}"], "--zzz: is not a flag here"),
    (["--\x1b[31m={}"], r"--\\x1b\[31m: is not a flag here"),
    (["--\x1b[31m=1"], r"--\\x1b\[31m: is not a flag here"),
]


@pytest.mark.parametrize(
    ("flags", "says"), MISTAKES, ids=[" ".join(flags) for flags, _ in MISTAKES]
)
def test_a_mistake_is_one_line_that_names_the_flag(flags, says):
    line = refused(*flags)
    assert re.search(says, line), line
    assert "\n" not in line and len(line) < 600 and "--help" not in line


IN_A_FILE = [
    ("--trainer", "zzz: 1", "--trainer.zzz: is not a flag here; --trainer has accelerator, "),
    ("--trainer", "max_epochs: x", "--trainer.max_epochs: found 'x', expected int or null"),
    (
        "--data",
        "{class_path: DigitsDataModule, init_args: {batch_size: x}}",
        "--data.batch_size: found 'x', expected int",
    ),
    (
        "--data",
        "{class_path: app.data.DigitsDataModule, init_args: {batch_size: x}}",
        "--data.batch_size: found 'x', expected int",
    ),
    (
        "--trainer.callbacks",
        "[{class_path: json.JSONDecoder}, {class_path: LearningRateMonitor}]",
        "--trainer.callbacks: found 'json.JSONDecoder', expected ",
    ),
    (
        "--trainer.callbacks",
        "[{class_path: EarlyStopping, init_args: {monitor: x, patience: y}}]",
        "--trainer.callbacks.patience: found 'y', expected int",
    ),
    ("--config", "config: others.yaml", "--zzz: is not a flag here; flags are --config, "),
    ("--config", "trainer: 5", "--trainer: found '5', expected its settings: --trainer.NAME=VALUE"),
]


@pytest.mark.parametrize(
    ("flag", "text", "line"), IN_A_FILE, ids=[f"{flag} {text}" for flag, text, _ in IN_A_FILE]
)
def test_a_mistake_in_a_file_for_a_flag_is_named(tmp_path, flag, text, line):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "others.yaml").write_text("zzz: 1")
    value = text if flag == "--trainer.callbacks" else "mine.yaml"
    assert refused(f"{flag}={value}").startswith(line)


def test_the_settings_are_not_printed_where_a_flag_is_wrong(capsys):
    """By the parsing that looks for what else is wrong."""
    line = refused("--trainer.max_epoch=2", "--print_config")
    assert line.startswith("--trainer.max_epoch: is not a flag here")
    assert "seed_everything" not in capsys.readouterr().out


@pytest.mark.usefixtures("only_installed_classes")
def test_all_wrong_flags_are_named_at_once(tmp_path):
    line = refused(
        "--trainer.gpus=2",
        "--max_epochs=a",
        "--data=Nope",
        "--data.size=3",
        "--trainer.max_steps=b",
        "stray",
    )
    message = re.sub("expected .*? or the import path", "expected CLASSES or the import path", line)
    assert message == (  # the classes are all that this process has imported
        "--max_epochs: is not a flag here; did you mean --trainer.max_epochs?; "
        "also --data: found 'Nope', expected CLASSES or the import path of a subclass "
        "of LightningDataModule; also stray: is not a flag here; flags are --config, "
        "--seed_everything, --lr_scaling, --optimizer, --lr_scheduler; in groups: --trainer, "
        "--model, --data, --logger, --checkpoint, --resume, --progress, --system, --divergence; "
        "also --trainer.gpus: is not a flag here; "
        "use --trainer.accelerator=gpu and --trainer.devices=N (-1: all); "
        "also --trainer.max_steps: found 'b', expected int"
    )


def test_an_error_that_names_no_flag_is_found_among_others():
    """jsonargparse only says that an int is too large to convert."""
    line = refused(
        "--trainer.max_epochs=3",
        "--zzz=1",
        f"--resume.every_n_minutes=1{'0' * 400}",
        "--trainer.max_steps=x",
        "--trainer.min_epochs=1",
    )
    assert re.search(
        "^--zzz: is not a flag here; .*; also --resume.every_n_minutes: .*too large.*; "
        "also --trainer.max_steps: found 'x', expected int$",
        line,
    ), line


def test_a_class_that_lacks_what_was_wrong_is_not_named_beside_it():
    line = refused("--lr_scheduler=StepLR", "--lr_scheduler.step_size=x", "--trainer.max_steps=y")
    assert line == (
        "--lr_scheduler.step_size: found 'x', expected int; "
        "also --trainer.max_steps: found 'y', expected int"
    )


def test_a_wrong_class_is_named_and_no_setting_of_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {init_args: {zzz: 3}}")
    for flags in (["--data=Nonesuch"], ["--data=Nonesuch", "--config=mine.yaml", "--data.zzz=4"]):
        line = refused("--data.zzz=4", *flags, "--trainer.max_steps=y")
        assert line.startswith("--data: found 'Nonesuch', ") and line.count("Nonesuch") == 1
        assert line.endswith("; also --trainer.max_steps: found 'y', expected int")
        assert "zzz" not in line


@pytest.fixture
def parsings(monkeypatch) -> list[int]:
    """How many settings were parsed each time that the search for mistakes parsed some."""
    parser_message = mistakes._parser_message
    numbers = []

    def count(parser, settings) -> tuple[str, bool]:
        numbers.append(len(settings))
        return parser_message(parser, settings)

    monkeypatch.setattr(mistakes, "_parser_message", count)
    return numbers


def test_thousands_of_unknown_names_are_not_parsed_one_by_one(parsings):
    names = [f"--{group}{number}=1" for number in range(1000) for group in ("a", "trainer.a")]
    line = refused(*names, "--trainer.max_steps=x", "stray")
    assert line.startswith("--a0, --a1, ") and "are not flags here" in line
    assert "--trainer.max_steps: found 'x', expected int" in line
    assert re.search(r"; also wrong: --trainer.a0, .* and 1981 more$", line), line
    assert parsings == [1, 0]


def test_the_search_for_mistakes_has_an_end(parsings):
    settings = [f"--optimizer.a{number}=1" for number in range(1000)]
    line = refused("--optimizer=Adam", *settings[:100])
    assert line.startswith("--optimizer.a0, --optimizer.a1, ") and len(line) < 960
    assert " more: Adam has no such setting; it has " in line
    assert line.endswith("; there may be more")
    assert len(parsings) == mistakes.MAX_EXPLAINED
    parsings.clear()
    assert refused("--optimizer=Adam", *settings).endswith("; there may be more")
    assert sum(parsings[:-1]) <= mistakes.MAX_PARSED < sum(parsings)


@pytest.mark.parametrize(
    ("value", "samples"), [("1e400", "inf"), (".nan", "nan"), ("1.5", "1.5"), ("-0.1", "-0.1")]
)
def test_a_val_split_that_is_out_of_range_is_refused(value, samples):
    datamodule = DigitsDataModule(**parsed(f"--data.val_split={value}").config.data.init_args)
    with pytest.raises(
        UserError,
        match=f"^--data.val_split: found {samples}, expected 1 to 99 of the 100 images",
    ):
        datamodule._splits(100)


def test_all_mistakes_in_a_file_of_flags_are_named_at_once(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "trainer: {gpus: 2, max_steps: 3}\n"
        "data: {class_path: DigitsDataModule, init_args: {batch_size: x}}\n"
    )
    assert refused("--config=mine.yaml", "--trainer.max_epochs=a") == (
        "--trainer.gpus: is not a flag here; use --trainer.accelerator=gpu and --trainer.devices=N "
        "(-1: all) (in mine.yaml); also --data.batch_size: found 'x', "
        "expected int (in mine.yaml); also --trainer.max_epochs: found 'a', "
        "expected int or null"
    )


BROKEN_FILES = {
    "[": r"cannot be read .while parsing a flow node expected .* found .*line 1, column 2",
    "a: &a [*a]": "cannot be read .Circular",
    "a text": "has no flags",
    "": "has no flags",
    "- 1": "has no flags",
}


@pytest.mark.parametrize(("text", "reason"), BROKEN_FILES.items(), ids=BROKEN_FILES)
def test_a_broken_file_of_flags_is_named(tmp_path, text, reason):
    (tmp_path / "mine.yaml").write_text(text)
    assert re.match(
        rf"--config: 'mine.yaml' {reason}.* expected YAML.*; also --trainer.zzz: ",
        refused("--config=mine.yaml", "--trainer.zzz=3"),
    )


def test_a_file_of_flags_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    line = f"--config: found 'mine.yaml', which is not a file in {tmp_path}; expected a file, or"
    assert refused("--config=mine.yaml").startswith(line)
    assert refused("--config", "mine.yaml").startswith(line)
    assert refused("--config=mine.yaml").endswith(" of accurate, cpu, fast, original")
    assert refused("--config").endswith("--config: expected one argument")
    assert re.match(
        "--config: found 'xxx.*, which is not a file in", refused(f"--config={'x' * 5000}")
    )


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["--a: 12345", "--b: 67890"], "--a: 12345; also --b: 67890"),
        (["--a: 12345", "--b: 678901", "--c: 3"], "--a: 12345; also --c: 3; also wrong: --b"),
        ([f"--a: {'x' * 15}"], f"--a: {'x' * 15}"),
        ([f"--a: {'x' * 16}", "--b: 1"], f"--a: {'x' * 12}...; also wrong: --b"),
    ],
)
def test_the_line_has_as_many_messages_as_there_is_room_for(monkeypatch, lines, text):
    monkeypatch.setattr(mistakes, "MAX_CHARACTERS", 120)  # 100 of them for the flags left out
    assert mistakes._join_lines(lines) == text


class Nullable:
    def __init__(
        self,
        required: int,
        either: int | None,
        other=3,
        anything: Any = 3,
        number: int = 3,
        none: int = None,
    ):
        """Take numbers."""


class Hinted:
    def __init__(self, number: "Unknown" = 3, **more):  # noqa: F821
        """Take what no module has."""


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [("required", True), ("either", True), ("other", True), ("anything", True), ("number", False)]
    + [("none", True), ("unheard_of", True)],
)
def test_null_is_allowed_where_a_setting_may_be_null(name, is_allowed):
    config = Namespace(
        model=Namespace(class_path=f"{__name__}.Nullable", init_args=Namespace({name: None})),
        logger=Namespace(name=None),
        data=None,
    )
    assert mistakes.unwanted(config) == (
        ""
        if is_allowed
        else f"--model.{name}: found null, expected a value; leave it out for its default"
    )
    config.model.class_path = f"{__name__}.Hinted"
    assert mistakes.unwanted(config) == ""


@pytest.mark.parametrize("number", [0, 2**32 - 1, True, False, None])
def test_the_seeds_that_are_allowed(number):
    assert mistakes.unwanted(Namespace(seed_everything=number)) == ""


def test_the_largest_whole_numbers():
    for number in (2**63 - 1, -(2**63), 1e300):
        assert mistakes.unwanted(Namespace(model=Namespace(init_args=Namespace(a=number)))) == ""
    for number, text in ((2**63, str(2**63)), (10**99, f"1{'0' * 56}...")):
        assert mistakes.unwanted(Namespace(model=Namespace(init_args=Namespace(a=number)))) == (
            f"--model.a: found {text}, expected whole numbers of 64 bits"
        )


def frames(*names: str) -> list[tuple]:
    """Return stand-ins of the frames of modules with these names."""
    return [(SimpleNamespace(f_globals={"__name__": name}), 1) for name in names]


OURS = "sagemaker_lightning.cli.lr_schedules"


@pytest.mark.parametrize(
    ("names", "is_named"),
    [
        (["torch.optim.adam"], True),
        (["json", "jsonargparse", "lightning.fabric"], True),
        ([OURS, "torch.optim.adam"], True),
        (["sagemaker_lightning.compat.lightning_loops", "pytorch_lightning"], True),
        ([], False),
        (["torch.optim.adam", OURS], False),
        (["torch", "sagemaker_lightning.compat.lightning_loops"], False),
        (["mine", "torch.optim.adam"], False),
        (["torchmetrics", "torch"], False),
        (["sagemaker_lightning.resume.callback", "torch"], False),
    ],
)
def test_an_error_is_about_a_flag_if_no_code_of_a_user_is_in_its_way(names, is_named):
    error = ValueError("no luck")
    raised = mistakes.named("--x", {}, error, frames(*names))
    if is_named:
        assert type(raised) is UserError and str(raised) == "--x: no luck"
    else:
        assert raised is error
    own = UserError("ours")
    assert mistakes.named("--x", {}, own, frames(*names)) is own


LETTERS = {"a": 1, "b": [2], "c": "x", "d": 0.5, "e": None}
ERRORS = [
    (ValueError("no\n luck"), {}, "--x: no luck"),
    (MisconfigurationException("no luck"), {}, "--x: no luck"),
    (KeyError("k"), {}, "--x: KeyError: 'k'"),
    (ValueError(), {}, "--x: ValueError"),
    (TypeError("no luck"), LETTERS, "--x: TypeError: no luck; found a=1, c=x, d=0.5"),
    (ValueError("no"), {"class_path": "y", "init_args": {"a": 1}}, "--x: no; found a=1"),
    (ValueError("no"), {"class_path": "y", "init_args": {}}, "--x: no; found class_path=y"),
    (ValueError("`lr` is bad"), {"lr": -1, "l": 2}, "--x.lr: found -1, which cannot be: `lr` is b"),
    (ValueError("a b: lr = 3"), {"a": 1, "lr": 3}, "--x.lr: found 3, which cannot be: a b"),
    (ValueError("`a` of b"), {"a": 1, "b": "3"}, "--x.a: found 1, which cannot be: `a` of b"),
    (ValueError("mode is odd"), {"mode": "m"}, "--x.mode: found 'm', which cannot be: mode is odd"),
    (ValueError("a or b"), {"a": 1, "b": 3}, "--x: a or b; found a=1, b=3"),
    (ValueError("y" * 501), {}, f"--x: {'y' * 497}..."),
    (ValueError(f"a={'y' * 600}"), {"a": 1}, f"--x.a: found 1, which cannot be: a={'y' * 595}..."),
    (ValueError("no"), {"a": "y" * 198, "b": 1}, f"--x: no; found a={'y' * 198} and 1 more"),
]


@pytest.mark.parametrize(
    ("error", "settings", "line"), ERRORS, ids=[str(e[0])[:20] for e in ERRORS]
)
def test_an_error_about_settings_names_their_flag(error, settings, line):
    assert str(mistakes.named("--x", settings, error, frames("torch"))).startswith(line)


def test_an_error_of_code_that_does_more_is_left_without_the_flag():
    error = MisconfigurationException("no luck")
    settings = {"a": 1}
    line = mistakes.named("--x", settings, error, frames("torch"), mistakes.MISCONFIGURED)
    assert str(line) == "no luck"
    error = MisconfigurationException("`a` is bad")
    line = mistakes.named("--x", settings, error, frames("torch"), mistakes.MISCONFIGURED)
    assert str(line) == "--x.a: found 1, which cannot be: `a` is bad"


def test_the_frames_of_naming_itself_do_not_count():
    with (
        pytest.raises(UserError, match="^--x: Invalid literal for Fraction: 'y'"),
        mistakes.naming("--x", {}),
    ):
        fractions.Fraction("y")
    with (
        pytest.raises(ValueError, match="^Invalid literal"),
        mistakes.naming("--x", {}, mistakes.MISCONFIGURED),
    ):
        fractions.Fraction("y")


def test_an_error_of_somebodys_code_keeps_its_cause():
    cause = KeyError("k")
    with pytest.raises(ValueError, match="^mine$") as raised, mistakes.naming("--x", {}):
        raise ValueError("mine") from cause
    assert raised.value.__cause__ is cause


def test_an_error_that_is_about_no_flag_stays_as_it_is():
    """Whoever chose the settings has nothing to do with it."""
    try:
        fractions.Fraction("y")
    except ValueError as error:
        of_a_library = error.with_traceback(error.__traceback__.tb_next)
    assert mistakes.of_a_component(of_a_library, Namespace()) is of_a_library
    with pytest.raises(ModuleNotFoundError, match="comet"):
        cli("--trainer.logger=CometLogger")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_gpu_is_refused_on_a_machine_without_one(name):
    line = refused(f"--trainer.accelerator={name}")
    assert line.startswith(f"--trainer.accelerator={name}: this machine has no GPU")
