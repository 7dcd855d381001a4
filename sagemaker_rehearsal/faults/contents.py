"""Damages the content of a file, as a cut upload or a bad disk does."""


def halve(content: bytes) -> bytes:
    """Return the first half of a file's content."""
    return content[: len(content) // 2]


def flip_bit(content: bytes, bit: int) -> bytes:
    """Return a file's content with one bit changed; as it is if it is empty.

    Args:
        content: The content.
        bit: The number of the bit; modulo the number of bits.
    """
    if not content:
        return content
    place, shift = divmod(bit % (8 * len(content)), 8)
    changed = bytearray(content)
    changed[place] ^= 1 << shift
    return bytes(changed)
