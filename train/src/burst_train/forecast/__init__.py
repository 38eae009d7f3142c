"""Predict the time, traffic and memory of a training step on hardware that is not at hand."""
