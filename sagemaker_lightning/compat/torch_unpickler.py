"""What torch's reader of files calls, when it reads with `weights_only=True`.

It makes bytes of text by `codecs.encode`, of any encoding: by "hex", a file of 600 bytes makes
hundreds of megabytes, and one of 800 bytes all that a machine has. Pickle itself writes bytes by
"latin1" alone (`save_bytes` in pickle.py, protocol 2).

On an upgrade: see `_get_allowed_globals` in torch/_weights_only_unpickler.py: whether its result is
still one dict, and which of the functions in it return more than they get.
"""

from pickle import UnpicklingError
from typing import Any

from torch import _weights_only_unpickler

ENCODE = "_codecs.encode"


def bound_bytes() -> None:
    """Let no file that is read with `weights_only=True` make more bytes than it has."""
    _weights_only_unpickler._get_allowed_globals()[ENCODE] = _to_bytes


def _to_bytes(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise UnpicklingError("bytes in it are not as pickle writes them")
    return text.encode("latin1")
