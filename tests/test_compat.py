"""compat/: says which private names of other packages have moved.

All uses of private names must go through the seam.
"""

import ast
import dis
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from containers import ROOT
from pytorch_lightning.callbacks import StochasticWeightAveraging

from sagemaker_lightning.compat import lightning_callbacks, names, namespaces, versions
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.process import lightning_import

APP = ROOT / "app"
RUNTIME = ROOT / "sagemaker_lightning"
COMPAT = sorted(path for path in (RUNTIME / "compat").glob("*.py") if path.stem != "names")
OTHERS = sorted(
    path for path in (*APP.rglob("*.py"), *RUNTIME.rglob("*.py")) if path.parent.name != "compat"
)
PACKAGES = {
    "torch",
    "torchvision",
    "torchmetrics",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
}
PACKAGES |= {"jsonargparse", "sagemaker_training", "fsspec", "lightning"}
# `_fields` of a named tuple belongs to Python, and is public.
PRIVATE = re.compile(r"(?!_fields$)_[A-Za-z]\w*")
TOOLKIT = {"user_program", "requirements", "train_command", "toolkit_hook", "__main__"}
"""Modules that import the toolkit, which reads its folders' paths at import.

None of their classes has a foreign base class.
"""


def test_the_documents_say_what_would_replace_each_seam():
    page = (ROOT / "docs/development.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \|", page.partition("## What upstream could offer")[2], re.MULTILINE
    )
    assert sorted(rows) == sorted(names.NEEDS)


def test_no_private_name_has_moved():
    """One line for each name that has changed, and the code of ours that needs it."""
    moved = []
    for ours, modules in names.NEEDS.items():
        for module, needed in modules.items():
            for name, forms in needed.items():
                found = form(module, name, forms)
                if not any(fits(found, one) for one in forms.split(" | ")):
                    who = (
                        ", ".join(users(RUNTIME / f"compat/{ours}.py", name.rpartition(".")[2]))
                        or "its users"
                    )
                    moved.append(
                        f"{module}.{name}: found {found}, expected {forms}; "
                        f"sagemaker_lightning/compat/{ours}.py, {who}"
                    )
    versions_of = f"Lightning {pytorch_lightning.__version__}, torch {torch.__version__}"
    assert not moved, "\n".join([f"{versions_of}: {len(moved)} names have moved:", *moved])


def form(module: str, name: str, forms: str) -> str:
    """Return the form of a name, in the words of sagemaker_lightning/compat/names.py."""
    try:
        owner = found = importlib.import_module(module)
    except ImportError:
        return "absent"
    *path, last = name.split(".")
    for part in path:
        owner = inspect.getattr_static(owner, part, None)
    if forms == "local":
        return "local" if last in inspect.unwrap(owner).__code__.co_varnames else "absent"
    # torch's settings have __getattr__.
    get = getattr if isinstance(owner, types.ModuleType) else inspect.getattr_static
    found = get(owner, last, None)
    found = found.__func__ if isinstance(found, staticmethod) else found
    if forms == "attribute" and isinstance(owner, type):
        return "attribute" if last in stored(owner) else "absent"
    if found is None:
        return "absent"
    if isinstance(found, type):
        return "class"
    if isinstance(found, property):
        return "property"
    if inspect.isfunction(found):
        return f"({', '.join(inspect.signature(found).parameters)})"
    return "value"


def fits(found: str, expected: str) -> bool:
    """Return whether the form of a name is an expected one."""
    return found == expected or (
        expected.endswith("...)") and found.startswith(expected.removesuffix(", ...)"))
    )


def codes(kind: type) -> Iterator[types.CodeType]:
    """Yield the code objects of a class and of its bases."""
    for value in (value for one in kind.__mro__ for value in vars(one).values()):
        function = inspect.unwrap(value) if callable(value) else getattr(value, "fget", None)
        if isinstance(function, types.FunctionType):
            yield function.__code__


@functools.cache
def stored(kind: type) -> set[str]:
    """Return the names of the attributes that a class gives its objects.

    Its code sets them, its annotations declare them, or a string names them.
    """
    found = {name for one in kind.__mro__ for name in inspect.get_annotations(one)}
    for code in codes(kind):
        found |= {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
        found |= {
            text for text in code.co_consts if isinstance(text, str) and PRIVATE.fullmatch(text)
        }
    return found


@functools.cache
def private(kind: type) -> set[str]:
    """Return the private names that a class has or uses."""
    found = {name for one in kind.__mro__ for name in vars(one)} | stored(kind)
    return {
        name
        for name in found.union(*(code.co_names for code in codes(kind)))
        if PRIVATE.fullmatch(name)
    }


def users(path: Path, name: str) -> list[str]:
    """Return the functions and classes of a module that use a name."""
    tree = ast.parse(path.read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name in mentioned(node)
    ]


def mentioned(tree: ast.AST) -> Iterator[str]:
    """Yield each private name that code imports, reads, overrides, or has in a string."""
    for node in ast.walk(tree):
        found: list[object] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            texts = [getattr(node, "module", None) or "", *(one.name for one in node.names)]
            found = [part for text in texts for part in text.split(".")]
        elif isinstance(node, ast.ClassDef):
            found = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
        elif isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.keyword):
            found = [node.arg]
        elif isinstance(node, ast.Constant):
            found = [node.value]
        yield from (name for name in found if isinstance(name, str) and PRIVATE.fullmatch(name))


def own(tree: ast.AST) -> set[str]:
    """Return the functions and classes that a module defines."""
    return {
        one.name
        for one in getattr(tree, "body", ())
        if isinstance(one, (ast.FunctionDef, ast.ClassDef))
    }


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.stem)
def test_the_table_has_all_that_a_module_uses(path: Path):
    """And nothing that it does not use."""
    tree = ast.parse(path.read_text())
    needed = names.NEEDS.get(path.stem, {})
    used = set(mentioned(tree)) - own(tree)
    texts = [
        text
        for module, each in needed.items()
        for name, forms in each.items()
        for text in (module, name, forms)
    ]
    known = {word for text in texts for word in re.findall(r"\w+", text)}
    assert sorted(used - known) == [], "sagemaker_lightning/compat/names.py lacks them"
    listed = {name.rpartition(".")[2] for each in needed.values() for name in each}
    assert sorted({name for name in listed if PRIVATE.fullmatch(name)} - used) == [], (
        "nobody needs them any more"
    )


def test_what_we_add_to_a_class_of_theirs_is_not_theirs():
    """If a new version adds the same public name, ours would override it unnoticed."""
    taken = []
    for path in COMPAT:
        module = importlib.import_module(f"sagemaker_lightning.compat.{path.stem}")
        for kind in (
            one
            for one in vars(module).values()
            if getattr(one, "__module__", "") == module.__name__
        ):
            bases = [
                one
                for one in getattr(kind, "__mro__", ())
                if not one.__module__.startswith("sagemaker_lightning.compat.")
            ]
            theirs = {name for base in bases for name in (*vars(base), *stored(base))}
            ours = (
                {name for name in getattr(kind, "__dict__", ()) if name[0] != "_"}
                if bases
                else set()
            )
            taken += [f"{kind.__name__}.{name}" for name in ours & theirs]
    # These are overridden on purpose: get_code is importlib's documented way to change what is run.
    expected = ["RunLogger.experiment", "WriterLogger.experiment", "_WithoutSignal.get_code"]
    assert sorted(taken) == expected


def test_nobody_goes_around_the_seam():
    """Ruff cannot see these: private names of a foreign base class, and names in strings.

    The private names are overridden, or used through `self`.
    """
    around = []
    for path in (one for one in OTHERS if one.stem not in TOOLKIT):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
            texts = {
                one.value
                for one in node.args[1:2]
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
            if getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr"):
                around += [
                    f"{path.name}:{node.lineno}: {name}"
                    for name in texts
                    if PRIVATE.fullmatch(name)
                ]
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)):
            kind = getattr(module, node.name, None)
            bases = kind.__mro__[1:] if isinstance(kind, type) else ()
            theirs = {
                name
                for base in bases
                if base.__module__.partition(".")[0] in PACKAGES
                for name in private(base)
            }
            around += [
                f"{path.name}: {node.name}.{name}" for name in sorted(theirs & set(mentioned(node)))
            ]
    assert not around


def test_a_version_that_is_not_supported_is_one_line(monkeypatch):
    """And none is said of the others, nor where a package has no metadata."""
    has = {}
    monkeypatch.setattr(versions, "version", lambda name: has.get(name, ""))
    name = namespaces.distribution()
    for found in ("", "2.5.2", "2.5.10", "2.6", "2.6.0.post0", "2.6.7rc1"):
        has[name] = found
        lightning_import.check_version()
    for found in ("1.9.5", "2.5.1.post0", "2.7.0", "2.10.1", "3.0.0"):
        has[name] = found
        with pytest.raises(
            UserError, match=f"^requirements.txt: found {name} {found}, expected 2.5.2 or later"
        ):
            lightning_import.check_version()
    has[name] = "2.6.6"
    for found in ("2.11.0", "2.15.0+cu130", "3.0"):
        has["torch"] = found
        lightning_import.check_version()
    has["torch"] = "2.9.1"
    with pytest.raises(UserError, match="^torch: found 2.9.1, expected 2.11 or later"):
        lightning_import.check_version()
    assert not versions.unsupported(name, pytorch_lightning.__version__)


@pytest.mark.parametrize("program", ["train.py", "train_multi_node.py"])
def test_a_job_that_has_installed_another_version_ends_with_that_line(tmp_path: Path, program):
    """Before Lightning is imported, which may fail, and as the job's FailureReason."""
    name = namespaces.distribution()
    installed = tmp_path / f"installed/{name.replace('-', '_')}-2.4.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.4.0\n")
    variables = os.environ | {
        "PYTHONPATH": f"{installed.parent}:{ROOT}",
        "SM_OUTPUT_DIR": str(tmp_path),
    }
    line = [sys.executable, str(APP / program)]
    done = subprocess.run(
        line, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # A busy machine prints these lines, too.
    (said,) = (one for one in done.stderr.splitlines() if not one.startswith("starting: "))
    expected = (
        f"error: requirements.txt: found {name} 2.4.0, expected 2.5.2 or later and below 2.7; give "
    )
    assert done.returncode == 1 and said.startswith(expected)
    assert (tmp_path / "failure").read_text() == said


def test_an_average_counts_again_even_after_an_error():
    callback = StochasticWeightAveraging(swa_lrs=0.1)
    before = callback._latest_update_epoch
    with pytest.raises(ZeroDivisionError), lightning_callbacks.weights_averaged_in(callback, 7):
        assert callback._latest_update_epoch == 7
        raise ZeroDivisionError
    assert callback._latest_update_epoch == before != 7
