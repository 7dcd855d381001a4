"""Which code of libraries a record may name: classes of Python's, and torch's layers and functions.

A record is input. So it names nothing that would do more than compute, and nothing of the user's.
"""

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sagemaker_lightning.state.graph.kinds.base import class_name

PYTHONS: dict[str, Any] = {
    class_.__name__: class_ for class_ in (int, float, list, dict, set, str, bool)
}
"""Classes that a defaultdict may have as its factory."""
LAYERS: dict[str, type] = {
    class_name(class_): class_
    for class_ in vars(nn).values()
    if isinstance(class_, type) and issubclass(class_, nn.Module)
}
"""The classes of torch's modules."""
OPENS_FILES = {"from_file"}
FUNCTIONS: dict[str, Any] = {
    f"{module.__name__}.{name}": function
    for module in (torch, functional)
    for name, function in vars(module).items()
    if not name.startswith("_")
    and name not in OPENS_FILES
    and (
        (isinstance(function, types.FunctionType) and module is functional)
        or (
            isinstance(function, types.BuiltinFunctionType)
            # The others, as torch.set_num_threads, are functions of a module of C++.
            and (module is functional or function.__self__ is None)
        )
    )
}
"""What torch computes with."""
NAMED = PYTHONS | LAYERS | FUNCTIONS
"""All of it, by name."""
NAMES = {id(code): name for name, code in reversed(NAMED.items())}
"""Its names, by id; of two names, the first one."""
