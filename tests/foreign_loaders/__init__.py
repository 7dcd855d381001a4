"""Loaders of public libraries, interrupted at random (see __main__.py)."""
