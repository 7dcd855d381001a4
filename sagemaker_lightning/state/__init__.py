"""What a user's objects hold: found, told apart, copied into plain values, and given back."""
