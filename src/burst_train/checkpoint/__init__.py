"""Checkpoints that a run resumes from, over any number of ranks."""
