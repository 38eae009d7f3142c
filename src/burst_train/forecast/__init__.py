"""Predict a training step's time, traffic and memory on hardware you don't have."""
