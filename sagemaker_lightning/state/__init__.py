"""State of a user's objects: find it, compare it, encode it, restore it."""
