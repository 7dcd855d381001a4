"""What a checkpoint has: how each part of it is saved and comes back."""
