"""What replaces or surrounds the modules inside of a model: attention, mixers, positions, chunks, recomputation."""
