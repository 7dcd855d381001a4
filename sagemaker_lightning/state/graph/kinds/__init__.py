"""How each kind of object is taken apart, made and filled."""
