"""What other programs reconstruct from the checkpoints that are written."""
