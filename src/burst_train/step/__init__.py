"""One training step: the model, the optimizer, the loop, evaluation and export."""
