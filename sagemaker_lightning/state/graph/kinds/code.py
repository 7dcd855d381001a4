"""Which classes of libraries a record may name: a few of Python's, and those of torch's layers.

A record is input. So it names nothing that would do more than compute, nothing of the user's, and
no function.
"""

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from sagemaker_lightning.state.graph.kinds.base import class_name

FACTORIES: dict[str, Any] = {
    class_.__name__: class_ for class_ in (int, float, list, dict, set, str, bool)
}
"""Classes that a defaultdict may have as its factory, by name."""
NAMES_OF_FACTORIES = {id(class_): name for name, class_ in FACTORIES.items()}
"""Their names, by id."""
LAYERS: dict[str, type] = {
    class_name(class_): class_
    for class_ in (*vars(nn).values(), AveragedModel)
    if isinstance(class_, type) and issubclass(class_, nn.Module)
}
"""The classes of torch's modules, of which a record may make objects, by name."""
