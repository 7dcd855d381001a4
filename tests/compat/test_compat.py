"""compat/: says which private names of other packages have moved.

All uses of private names must go through the seam.
"""

import ast
import dis
import functools
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from containers import ROOT
from pytorch_lightning.demos.boring_classes import BoringModel

from sagemaker_lightning.compat import names
from sagemaker_lightning.state import object_graph

APP = ROOT / "app"
RUNTIME = ROOT / "sagemaker_lightning"
COMPAT_FILES = sorted(path for path in (RUNTIME / "compat").glob("*.py") if path.stem != "names")
OTHER_FILES = sorted(
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
PRIVATE_NAME = re.compile(r"(?!_fields$)_[A-Za-z]\w*")
TOOLKIT_MODULES = {"user_program", "requirements", "train_command", "toolkit_hook", "__main__"}
"""Modules that import the toolkit, which reads its folders' paths at import.

None of their classes has a foreign base class.
"""


def test_the_documents_say_what_would_replace_each_seam():
    page = (ROOT / "docs/development.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \|", page.partition("## What upstream could offer")[2], re.MULTILINE
    )
    assert sorted(rows) == sorted(names.NEEDS)


@pytest.mark.slow
def test_no_private_name_has_moved():
    """One line for each name that has changed, and the code of ours that needs it."""
    moved = []
    for compat_module, modules in names.NEEDS.items():
        for module, needed in modules.items():
            for name, forms in needed.items():
                actual = form(module, name, forms)
                if not any(form_fits(actual, expected) for expected in forms.split(" | ")):
                    user_names = (
                        ", ".join(
                            users_of(
                                RUNTIME / f"compat/{compat_module}.py", name.rpartition(".")[2]
                            )
                        )
                        or "its users"
                    )
                    moved.append(
                        f"{module}.{name}: found {actual}, expected {forms}; "
                        f"sagemaker_lightning/compat/{compat_module}.py, {user_names}"
                    )
    versions_of = f"Lightning {pytorch_lightning.__version__}, torch {torch.__version__}"
    assert not moved, "\n".join([f"{versions_of}: {len(moved)} names have moved:", *moved])


def form(module: str, name: str, forms: str) -> str:
    """Return the form of a name, in the words of sagemaker_lightning/compat/names.py."""
    try:
        owner = value = importlib.import_module(module)
    except ImportError:
        return "absent"
    *path, attribute = name.split(".")
    for name_part in path:
        owner = inspect.getattr_static(owner, name_part, None)
    if forms == "local":
        return "local" if attribute in inspect.unwrap(owner).__code__.co_varnames else "absent"
    # torch's settings have __getattr__.
    get = getattr if isinstance(owner, types.ModuleType) else inspect.getattr_static
    value = get(owner, attribute, None)
    value = value.__func__ if isinstance(value, staticmethod) else value
    if forms == "attribute" and isinstance(owner, type):
        return "attribute" if attribute in stored_attributes(owner) else "absent"
    if value is None:
        return "absent"
    if isinstance(value, type):
        return "class"
    if isinstance(value, property):
        return "property"
    if inspect.isfunction(value):
        return f"({', '.join(inspect.signature(value).parameters)})"
    return "value"


def form_fits(form: str, expected: str) -> bool:
    return form == expected or (
        expected.endswith("...)") and form.startswith(expected.removesuffix(", ...)"))
    )


def code_objects(cls: type) -> Iterator[types.CodeType]:
    """Yield the code objects of a class and of its bases."""
    for value in (value for base in cls.__mro__ for value in vars(base).values()):
        function = inspect.unwrap(value) if callable(value) else getattr(value, "fget", None)
        if isinstance(function, types.FunctionType):
            yield function.__code__


@functools.cache
def stored_attributes(cls: type) -> set[str]:
    """Return the names of the attributes that a class gives its objects.

    Its code sets them, its annotations declare them, or a string names them.
    """
    attributes = {name for entry in cls.__mro__ for name in inspect.get_annotations(entry)}
    for code in code_objects(cls):
        attributes |= {
            entry.argval for entry in dis.get_instructions(code) if entry.opname == "STORE_ATTR"
        }
        attributes |= {
            text
            for text in code.co_consts
            if isinstance(text, str) and PRIVATE_NAME.fullmatch(text)
        }
    return attributes


@functools.cache
def private_names(cls: type) -> set[str]:
    """Return the private names that a class has or uses."""
    names_found = {name for base in cls.__mro__ for name in vars(base)} | stored_attributes(cls)
    return {
        name
        for name in names_found.union(*(code.co_names for code in code_objects(cls)))
        if PRIVATE_NAME.fullmatch(name)
    }


def users_of(path: Path, name: str) -> list[str]:
    """Return the functions and classes of a module that use a name."""
    tree = ast.parse(path.read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name in mentioned_names(node)
    ]


def mentioned_names(tree: ast.AST) -> Iterator[str]:
    """Yield each private name that code imports, reads, overrides, or has in a string."""
    for node in ast.walk(tree):
        candidates: list[object] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            texts = [getattr(node, "module", None) or "", *(entry.name for entry in node.names)]
            candidates = [name_part for text in texts for name_part in text.split(".")]
        elif isinstance(node, ast.ClassDef):
            candidates = [entry.name for entry in node.body if isinstance(entry, ast.FunctionDef)]
        elif isinstance(node, ast.Attribute):
            candidates = [node.attr]
        elif isinstance(node, ast.keyword):
            candidates = [node.arg]
        elif isinstance(node, ast.Constant):
            candidates = [node.value]
        yield from (
            name for name in candidates if isinstance(name, str) and PRIVATE_NAME.fullmatch(name)
        )


def own_definitions(tree: ast.AST) -> set[str]:
    """Return the functions and classes that a module defines."""
    return {
        node.name
        for node in getattr(tree, "body", ())
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


@pytest.mark.parametrize("compat_module", names.WORDING)
def test_texts_of_others_have_the_words_that_we_look_for(compat_module: str):
    """And our module still looks for each of them."""
    ours = (RUNTIME / f"compat/{compat_module}.py").read_text()
    for module, texts in names.WORDING[compat_module].items():
        source = inspect.getsource(importlib.import_module(module))
        changed = [text for text in texts if text not in source]
        assert not changed, f"{module} has other words now; compat/{compat_module}.py needs them"
        assert not [text for text in texts if text.strip(" ':") not in ours], "nobody needs them"


@pytest.mark.parametrize("path", COMPAT_FILES, ids=lambda path: path.stem)
def test_the_table_has_all_that_a_module_uses(path: Path):
    """And nothing that it does not use."""
    tree = ast.parse(path.read_text())
    needed = names.NEEDS.get(path.stem, {})
    used = set(mentioned_names(tree)) - own_definitions(tree)
    texts = [
        text
        for module, needed_names in needed.items()
        for name, forms in needed_names.items()
        for text in (module, name, forms)
    ]
    known = {word for text in texts for word in re.findall(r"\w+", text)}
    assert sorted(used - known) == [], "sagemaker_lightning/compat/names.py lacks them"
    listed_names = {
        name.rpartition(".")[2] for needed_names in needed.values() for name in needed_names
    }
    assert sorted({name for name in listed_names if PRIVATE_NAME.fullmatch(name)} - used) == [], (
        "nobody needs them any more"
    )


def test_what_we_add_to_a_class_of_theirs_is_not_theirs():
    """If a new version adds the same public name, ours would override it unnoticed."""
    taken = []
    for path in COMPAT_FILES:
        module = importlib.import_module(f"sagemaker_lightning.compat.{path.stem}")
        for cls in (
            entry
            for entry in vars(module).values()
            if getattr(entry, "__module__", "") == module.__name__
        ):
            bases = [
                entry
                for entry in getattr(cls, "__mro__", ())
                if not entry.__module__.startswith("sagemaker_lightning.compat.")
            ]
            foreign_names = {
                name for base in bases for name in (*vars(base), *stored_attributes(base))
            }
            own_names = (
                {name for name in getattr(cls, "__dict__", ()) if name[0] != "_"}
                if bases
                else set()
            )
            taken += [f"{cls.__name__}.{name}" for name in own_names & foreign_names]
    # These are overridden on purpose.
    assert sorted(taken) == [
        *(
            f"ResumableModelParallel.{name}"
            for name in (
                "lightning_module_state_dict",
                "lightning_restore_optimizer",
                "load_checkpoint",
                "load_model_state_dict",
                "load_optimizer_state_dict",
                "model_sharded_context",
                "model_to_device",
                "optimizer_state",
                "restore_checkpoint_after_setup",
                "save_checkpoint",
            )
        ),
        "RunLogger.experiment",
        "WriterLogger.experiment",
        "_BeforeHooks.on_save_checkpoint",
    ]


@pytest.mark.slow
def test_private_names_are_in_compat_alone():
    """Ruff cannot see these: private names of a foreign base class, and names in strings.

    The private names are overridden, or used through `self`.
    """
    around = []
    for path in (
        other_file for other_file in OTHER_FILES if other_file.stem not in TOOLKIT_MODULES
    ):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        for node in (entry for entry in ast.walk(tree) if isinstance(entry, ast.Call)):
            texts = {
                entry.value
                for entry in node.args[1:2]
                if isinstance(entry, ast.Constant) and isinstance(entry.value, str)
            }
            if getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr"):
                around += [
                    f"{path.name}:{node.lineno}: {name}"
                    for name in texts
                    if PRIVATE_NAME.fullmatch(name)
                ]
        for node in (entry for entry in ast.walk(tree) if isinstance(entry, ast.ClassDef)):
            cls = getattr(module, node.name, None)
            bases = cls.__mro__[1:] if isinstance(cls, type) else ()
            foreign_names = {
                name
                for base in bases
                if base.__module__.partition(".")[0] in PACKAGES
                for name in private_names(base)
            }
            around += [
                f"{path.name}: {node.name}.{name}"
                for name in sorted(foreign_names & set(mentioned_names(node)))
            ]
    assert not around


@pytest.mark.slow
def test_all_attributes_that_lightning_gives_a_trainer_are_known(tmp_path: Path):
    """What a trainer has besides, a user has added."""
    trainer = pytorch_lightning.Trainer(
        max_epochs=1, limit_train_batches=2, logger=False, default_root_dir=tmp_path
    )
    trainer.fit(BoringModel())
    trainer.validate(BoringModel(), verbose=False)
    trainer.predict(BoringModel())
    assert object_graph.attributes(object_graph.added_to(trainer)) == {}
