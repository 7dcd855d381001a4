"""Texts that a job may print, write or be given, to break who reads them."""

import random

PIECES = [
    *"=<>&\"'\\\r\n\t\0\x1b\x07\x7f\x9b %|/:;,.-ü",
    "\u2028",
    "\u202e",
    "\ufeff",
    "\U0001f600",
    "\u0301",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "[red]",
    "[/]",
    "{}",
    "%s",
    "]]>",
    "</script>",
    "</style>",
    "&#0;",
    "<!--",
    "eyJ-",
    "://",
    "x://a@",
    "-----BEGIN",
    "-----END X-----",
    "AKIAABCDEFGHIJKLMNOP",
    "token=",
    "password",
    "a=",
    " step=",
    " step=7 ",
    " step=999999999999999 ",
    " loss=",
    " val_loss=0.5 ",
    " images/s=3 ",
    " epoch=1 ",
    "1",
    "9" * 400,
    "1e999",
    "4e-323",
    "-1e-300",
    "nan",
    "-inf",
    "0.25",
    "resuming from step 9",
    " resuming from step 999999999999999: /opt/ml/checkpoints/step-9.ckpt",
    "warning: checkpoint x is damaged; it is skipped",
    " resumed at step 3: ",
    "interrupted, resume from step 4: ",
    '{"a":' * 50,
    "[" * 50,
]
REPEATS = (1, 1, 1, 1, 2, 3, 30, 1000, 20_000)


def text(draw: random.Random, most: int = 300_000) -> str:
    parts = (draw.choice(PIECES) * draw.choice(REPEATS) for _ in range(draw.randint(1, 6)))
    return "".join(parts)[: draw.choice((most, most, draw.randint(0, most)))]


def name(draw: random.Random, most: int = 80) -> str:
    """Return a text that a file can have as its name."""
    return text(draw, most).replace("/", "_").replace("\0", "_").strip(".") or "x"
