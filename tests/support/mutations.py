"""The changes of the code that `make mutants` makes, and how a running process takes one.

A change is a mutant: "PATH:NUMBER" names the change with that number in a file. A process takes it
by `apply`: functions that are there already get the changed code, and the file is changed when it
is imported. The standard library alone is needed.
"""

import ast
import copy
import functools
import gc
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

MUTANT_VARIABLE = "SAGEMAKER_LIGHTNING_MUTANT"
"""Names the mutant to the processes that a test starts."""
HOOK_VARIABLE = "SAGEMAKER_LIGHTNING_MUTANT_HOOK"
"""The folder of this module, for a new Python process (HOOK_LINE)."""
HOOK_LINE = (
    f"import os, sys; folder = os.environ.get({HOOK_VARIABLE!r}); "
    "folder and (sys.path.insert(0, folder), __import__('mutations').apply_named(), "
    "sys.path.remove(folder))\n"
)
"""A line of a .pth file: by it, a Python process takes the mutant before it imports the code."""
SWAPPED_OPERATORS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
PLAIN = (int, float, complex, bool, str, bytes, tuple, frozenset, list, set, dict, type(None))


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: The file.
        number: Number of the change in the file.
        kind: What is changed: a comparison, operator, not, constant, condition, return or call.
        first_line: First line that is changed.
        last_line: Last line that is changed.
        is_in_function: Whether it runs when a function is called, not when the file is imported.
        text: The first line as it is.
        replacement: What takes the place of the changed expression.
    """

    path: str
    number: int
    kind: str
    first_line: int
    last_line: int
    is_in_function: bool
    text: str
    replacement: str

    @property
    def name(self) -> str:
        """The name by which a process takes it."""
        return f"{self.path}:{self.number}"


def mutants(path: Path) -> list[Mutant]:
    source = path.read_text()
    tree = ast.parse(source)
    lines = source.splitlines()
    lines_of_functions = {
        line
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(function.body[0].lineno, function.end_lineno + 1)
    }
    return [
        Mutant(
            str(path),
            number,
            kind,
            node.lineno,
            node.end_lineno,
            node.lineno in lines_of_functions,
            lines[node.lineno - 1].strip(),
            ast.unparse(changed),
        )
        for number, (kind, node, changed) in enumerate(_changes(tree))
    ]


def _without_effect(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes whose change nothing that runs in a test can show.

    They are what type checkers alone read, the start of a file as a script, whether a line is
    printed at once (the image sets PYTHONUNBUFFERED), an assertion that lengths are equal, and the
    limits of time: another second is the same to a test that does not go by the clock.
    """
    parts: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if test in ("TYPE_CHECKING", "__name__ == '__main__'"):
                parts += [node.test, *node.body]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts += [node.annotation] if node.annotation else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts += [node.returns] if node.returns else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            what_nobody_sees = {("print", "flush", "True"), ("zip", "strict", "True")}
            parts += [
                each.value
                for each in node.keywords
                if (name, each.arg, ast.unparse(each.value)) in what_nobody_sees
            ]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node in tree.body:
            (target, *_) = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(target, ast.Name) and target.id.endswith("_SECONDS"):
                parts += [node.value] if node.value else []
    return {node for part in parts for node in ast.walk(part)}


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield (kind, node, node that replaces it) for each change."""
    without_effect = _without_effect(tree)
    for node in ast.walk(tree):
        # In an `if`, the condition is what changes.
        if getattr(node, "test", node) in without_effect:
            continue
        changed = copy.copy(node)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED_OPERATORS:
            changed.ops = [SWAPPED_OPERATORS[type(node.ops[0])](), *node.ops[1:]]
            yield "comparison", node, changed
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPPED_OPERATORS:
            changed.op = SWAPPED_OPERATORS[type(node.op)]()
            yield "operator", node, changed
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "not", node, node.operand
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield "constant", node, changed
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(
            node.test, ast.Constant
        ):
            yield "condition", node.test, ast.Constant(False)
        elif (
            isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant)
        ):
            yield "return", node.value, ast.Constant(None)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "call", node, ast.Pass()


class _Replacing(ast.NodeTransformer):
    """Puts one node in the place of another; lines stay as they were.

    What is left out stays where it never runs: a function needs its free variables, such as that of
    `super()`, to get the changed code.
    """

    def __init__(self, node: ast.AST, replacement: ast.AST) -> None:
        self.node = node
        if isinstance(replacement, ast.Pass):
            replacement = ast.If(ast.Constant(False), [node], [])
        elif isinstance(replacement, ast.Constant) and not isinstance(node, ast.Constant):
            replacement = ast.IfExp(ast.Constant(True), replacement, node)
        self.replacement = ast.copy_location(replacement, node)

    def visit(self, node: ast.AST) -> ast.AST:
        return self.replacement if node is self.node else self.generic_visit(node)


def changed_code(path: str, number: int) -> types.CodeType:
    tree = ast.parse(Path(path).read_bytes(), path)
    _, node, replacement = list(_changes(tree))[number]
    _Replacing(node, replacement).visit(tree)
    return compile(ast.fix_missing_locations(tree), path, "exec")


def apply_named() -> None:
    """Take the mutant that the environment names, if it names one."""
    if name := os.environ.get(MUTANT_VARIABLE):
        path, _, number = name.rpartition(":")
        apply(path, int(number))


def apply(path: str, number: int, is_in_function: bool | None = None) -> None:
    """Take one change of a file in this process, for what is imported and what will be.

    Raises whatever the changed file raises where it has to run again: that is, if what changes
    stands outside of its functions.
    """
    code = changed_code(path, number)
    original_get_code = SourceFileLoader.get_code

    @functools.wraps(original_get_code)
    def get_code(self, fullname):
        return code if self.path == path else original_get_code(self, fullname)

    SourceFileLoader.get_code = get_code
    imported = [
        module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path
    ]
    if not imported:
        return
    if is_in_function is None:
        is_in_function = mutants(Path(path))[number].is_in_function
    if is_in_function:
        change_functions(code)
    else:
        for module in imported:
            run_again(module, code)


def _codes_of_functions(code: types.CodeType) -> dict[tuple[str, int], list[types.CodeType]]:
    """Return the codes of all functions in a code, by qualified name and first line."""
    codes: dict[tuple[str, int], list[types.CodeType]] = {}
    remaining = [code]
    while remaining:
        for constant in remaining.pop().co_consts:
            if isinstance(constant, types.CodeType):
                key = constant.co_qualname, constant.co_firstlineno
                codes.setdefault(key, []).append(constant)
                remaining.append(constant)
    return codes


@functools.cache
def functions_of_files() -> dict[str, list[types.FunctionType]]:
    """Return the functions of each file that this process, or the one that forked it, has."""
    functions: dict[str, list[types.FunctionType]] = {}
    gc.unfreeze()
    for value in gc.get_objects():
        if type(value) is types.FunctionType:
            functions.setdefault(value.__code__.co_filename, []).append(value)
    gc.freeze()
    return functions


def change_functions(code: types.CodeType) -> int:
    """Give the functions of a file that exist the code that they have in `code`.

    Returns their number. Functions that have name and line in common (lambdas) are left alone.
    """
    codes = _codes_of_functions(code)
    changed = 0
    for function in functions_of_files().get(code.co_filename, ()):
        old = function.__code__
        candidates = codes.get((old.co_qualname, old.co_firstlineno), [])
        if len(candidates) == 1 and candidates[0].co_freevars == old.co_freevars:
            changed += candidates[0] != old
            function.__code__ = candidates[0]
    return changed


def run_again(module: types.ModuleType, code: types.CodeType) -> None:
    """Run a module's code again, and put what has changed into the module that is there."""
    names = (
        "__name__",
        "__file__",
        "__package__",
        "__spec__",
        "__loader__",
        "__path__",
        "__builtins__",
    )
    again = types.ModuleType(module.__name__)
    again.__dict__.update({name: vars(module)[name] for name in names if name in vars(module)})
    sys.modules[module.__name__] = again  # dataclasses look their module up
    try:
        exec(code, again.__dict__)
    finally:
        sys.modules[module.__name__] = module
    for name, new in list(vars(again).items()):
        old = vars(module).get(name)
        if name in names or name.startswith("__"):
            continue
        if not _is_plain_change(old, new):
            _take_over(old, new, module.__name__)
            continue
        for other in list(sys.modules.values()):  # who has imported the name
            variables = getattr(other, "__dict__", {})
            if variables.get(name, variables) is old or other is module:
                setattr(other, name, new)


def _is_plain_change(old: object, new: object) -> bool:
    """Return whether a name stands for another plain value now."""
    return isinstance(new, PLAIN) and type(old) is type(new) and repr(old) != repr(new)


def _take_over(old: object, new: object, module_name: str) -> None:
    """Change a function or a class, so that it does what its new one does."""
    if isinstance(old, type) and isinstance(new, type):
        if getattr(new, "__module__", None) != module_name:
            return
        for name, value in list(vars(new).items()):
            had = vars(old).get(name)
            if _is_plain_change(had, value):
                setattr(old, name, value)
            else:
                _take_over(had, value, module_name)
    elif isinstance(old, property) and isinstance(new, property):
        for part in ("fget", "fset", "fdel"):
            _take_over(getattr(old, part), getattr(new, part), module_name)
    elif isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
        if old.__code__.co_freevars == new.__code__.co_freevars:
            old.__code__ = new.__code__
        old.__defaults__ = new.__defaults__
        old.__kwdefaults__ = new.__kwdefaults__
        # A dataclass's __init__ has its defaults in cells, and a decorated function the other one.
        for cell, new_cell in zip(old.__closure__ or (), new.__closure__ or (), strict=False):
            if _is_plain_change(cell.cell_contents, new_cell.cell_contents):
                cell.cell_contents = new_cell.cell_contents
            elif isinstance(new_cell.cell_contents, types.FunctionType):
                _take_over(cell.cell_contents, new_cell.cell_contents, module_name)
        if hasattr(old, "__wrapped__") and hasattr(new, "__wrapped__"):
            _take_over(old.__wrapped__, new.__wrapped__, module_name)
    elif hasattr(old, "__func__") and hasattr(new, "__func__"):
        _take_over(old.__func__, new.__func__, module_name)
    elif hasattr(old, "__wrapped__") and hasattr(new, "__wrapped__"):
        _take_over(old.__wrapped__, new.__wrapped__, module_name)
