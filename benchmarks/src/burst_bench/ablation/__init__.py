"""Ablation: measure our attention with one feature disabled at a time."""
