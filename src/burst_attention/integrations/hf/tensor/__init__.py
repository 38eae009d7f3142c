"""Tensor parallelism inside of a sequence: weights cut along heads, columns, experts and the vocabulary."""
