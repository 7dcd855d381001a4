"""The recipes, each run in miniature, and the settings of the model that they use."""

import json
from functools import partial

import pytest
import torch
from conftest import ROOT
from torch import nn
from torchvision.models import ResNet, resnet18
from torchvision.models.resnet import BasicBlock

from sagemaker_lightning.cli import export
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError

from app.data import DigitsDataModule
from app.model import ResNet18
from app.train import APPLICATION

RECIPES = sorted(path.stem for path in (ROOT / "app/recipes").glob("*.yaml"))
# A CPU has no use for bfloat16, and the tests' image has no compiler.
MINIATURE_FLAGS = [
    "--trainer.precision=32-true",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--data.batch_size=8",
]


def made(folder, *flags: str) -> CommandLine:
    """Return the command line that these flags make."""
    return CommandLine(
        SageMakerEnvironment(
            model_dir=folder / "m", output_data_dir=folder, checkpoint_dir=folder / "c"
        ),
        list(flags),
        APPLICATION,
    )


@pytest.fixture
def shallow(monkeypatch):
    """Let the network have one block at each of its widths, so that it is made quickly."""
    monkeypatch.setattr("app.model.resnet18", partial(ResNet, BasicBlock, [1, 1, 1, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_in_miniature(recipe, cifar, tmp_path, shallow):
    flags = [f"--config={recipe}", f"--data.data_dir={cifar}", *MINIATURE_FLAGS]
    flags += (
        ["--data=CIFAR10DataModule"] if recipe in ("cpu", "original") else ["--model.compile=false"]
    )
    flags += ["--data.val_split=20"] if recipe in ("cpu", "original") else []
    cli = made(tmp_path, *flags)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.global_step == 2
    (metrics,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    assert 0 <= metrics["test_acc"] <= 1


def test_the_recipes():
    assert RECIPES == ["accurate", "cpu", "fast", "original"]


@pytest.mark.slow
def test_a_recipe_is_given_by_its_name_or_by_its_file(cifar, tmp_path):
    data_flags = [f"--data.data_dir={cifar}", "--data=CIFAR10DataModule"]
    for config in (
        ["--config=original"],
        ["--config", "original"],
        [f"--config={ROOT}/app/recipes/original.yaml"],
    ):
        cli = made(tmp_path, *config, *data_flags)
        assert cli.datamodule.batch_size == 32
        assert cli.datamodule.val_split == 0.2
        assert cli.trainer.max_epochs == 5
        assert cli.config.optimizer.class_path == "torch.optim.Adam"
    cli = made(tmp_path, "--config=original", "--data.batch_size=7", *data_flags)
    assert cli.datamodule.batch_size == 7  # a flag has priority over a recipe


def test_the_stem_for_small_images():
    """The stem for small images keeps the size, and does not pool.

    So the paper has it for CIFAR-10: the first convolution keeps the size, and there is no pooling.
    """
    model = ResNet18(num_classes=10, stem="small").eval()
    image = torch.rand(2, 3, 8, 8)
    sizes = []
    for layer in (model.network.relu, model.network.layer1, model.network.layer4):
        layer.register_forward_hook(lambda _, __, output: sizes.append(tuple(output.shape[1:])))
    assert model(image).shape == (2, 10)
    assert sizes[0] == sizes[1] == (64, 8, 8) and sizes[-1] == (512, 1, 1)
    assert model.network.conv1.kernel_size == (3, 3) and model.network.conv1.bias is None
    spread = model.network.conv1.weight.std().item()
    # torchvision's initialization, by fan-out
    assert spread == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)


@pytest.mark.slow
def test_an_exported_model_says_what_it_was_made_with(tmp_path):
    model = ResNet18(num_classes=10, stem="small", channels_last=True)
    export.save(tmp_path, model, DigitsDataModule(), {}, "", "")
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["hyperparameters"]["stem"] == "small"
    network = resnet18(num_classes=about["num_classes"])
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    image = torch.rand(2, 3, 32, 32)
    assert torch.allclose(network.eval()(image), model.eval()(image), atol=1e-4)


@pytest.mark.slow
def test_the_layout_changes_no_result(shallow):
    # In float64 the layouts differ by rounding alone: three steps at a loss this steep made
    # a hundredth of float32's rounding on some processors.
    torch.manual_seed(0)
    plain = ResNet18(num_classes=10).double()
    images = torch.rand(8, 3, 32, 32, dtype=torch.float64)
    labels = torch.arange(8)
    channels_last = ResNet18(num_classes=10, channels_last=True).double()
    channels_last.load_state_dict(plain.state_dict())
    losses = []
    for model in (plain, channels_last):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "layout"),
    [({}, torch.contiguous_format), ({"channels_last": True}, torch.channels_last)],
)
def test_weights_and_images_have_the_layout_that_is_asked_for(shallow, options, layout):
    model = ResNet18(num_classes=10, **options)
    laid_out = [model.network.layer1[0].conv1.weight]
    model.network.conv1.register_forward_pre_hook(lambda _, images: laid_out.extend(images))
    images = torch.rand(2, 3, 8, 8)
    assert model(images).shape == (2, 10) and torch.equal(laid_out[1], images)
    assert [tensor.is_contiguous(memory_format=layout) for tensor in laid_out] == [True, True]


def test_a_compiled_model_needs_a_compiler(shallow, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"--model.compile: found no C\+\+ compiler .* COMPILER=1"):
        ResNet18(num_classes=10, compile=True)


def test_a_compiled_model_is_compiled_when_it_is_first_used(shallow, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(type(module)))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    ResNet18(num_classes=10, compile=True)
    ResNet18(num_classes=10)
    assert compiled == [ResNet]


def test_what_the_steps_log(shallow):
    """Validation and test log the mean over all ranks, weighted by the batches' sizes."""
    model = ResNet18(num_classes=10, label_smoothing=0.3).eval()
    images = torch.rand(5, 3, 8, 8)
    logits = model(images).detach()
    labels = torch.where(torch.arange(5) < 3, logits.argmax(1), logits.argmin(1))
    logged = {}
    model.log_dict = lambda values, **options: logged.update({tuple(values): (values, options)})
    with torch.no_grad():
        for step in (model.training_step, model.validation_step, model.test_step):
            step((images, labels), 0)
    assert [options for _, options in logged.values()] == [
        {"batch_size": 5},
        {"batch_size": 5, "sync_dist": True},
        {"batch_size": 5, "sync_dist": True},
    ]
    values = {
        name: float(value)
        for logged_values, _ in logged.values()
        for name, value in logged_values.items()
    }
    loss = nn.functional.cross_entropy(logits, labels).item()
    smoothed = nn.functional.cross_entropy(logits, labels, label_smoothing=0.3).item()
    expected = {"train_loss": smoothed, "train_acc": 0.6, "val_loss": loss, "val_acc": 0.6}
    assert values == pytest.approx(expected | {"test_loss": loss, "test_acc": 0.6}, rel=1e-4)


def test_the_optimizer_that_is_used_if_none_is_named(shallow):
    optimizer = ResNet18(num_classes=10).configure_optimizers()
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["lr"] == 1e-3 and optimizer.defaults["fused"] is True


@pytest.mark.parametrize("smoothing", [1.0, -0.1])
def test_label_smoothing_is_a_share(smoothing):
    with pytest.raises(
        UserError,
        match=rf"--model.label_smoothing: found {smoothing}, expected 0 to less than 1",
    ):
        ResNet18(num_classes=10, label_smoothing=smoothing)


@pytest.mark.parametrize(("options", "share"), [({}, 0.0), ({"label_smoothing": 0.3}, 0.3)])
def test_the_loss_of_training_has_the_share_of_all_classes_that_is_asked_for(
    shallow, options, share
):
    model = ResNet18(num_classes=10, **options)
    model.log_dict = lambda *_, **__: None
    images = torch.rand(8, 3, 8, 8)
    labels = torch.arange(8)
    logits = model(images).log_softmax(1)
    expected = -((1 - share) * logits[range(8), labels].mean() + share * logits.mean())
    loss = model.training_step((images, labels), 0)
    assert loss.requires_grad and torch.allclose(loss, expected, atol=1e-5)


def test_off_a_cpu_adam_updates_all_parameters_at_once():
    """fused=False would keep torch from choosing `foreach`, which it does if fused is None."""
    model = ResNet18(10)
    assert model.configure_optimizers().defaults["fused"] is True
    assert model.to("meta").configure_optimizers().defaults["fused"] is None
