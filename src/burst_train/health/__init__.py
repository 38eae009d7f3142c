"""Watch a run: non-finite values, slow steps, FLOPs and traces."""
