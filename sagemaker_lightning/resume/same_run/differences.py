"""What messages say of the differences between two runs."""

from sagemaker_lightning.contract.errors import printable

MAX_CHARACTERS = 400  # of a phrase that quotes a checkpoint


def first_of(phrases: list[str]) -> str:
    """Return the first few phrases as one text, and how many more there are.

    They quote a checkpoint, which may have any text.
    """
    rest = f" (and {len(phrases) - 4} more)" if len(phrases) > 4 else ""
    quoted = [printable(phrase)[:MAX_CHARACTERS] for phrase in phrases[:4]]
    return f"{'; '.join(quoted)}{rest}"
