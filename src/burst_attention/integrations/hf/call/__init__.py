"""One call of a parallelized model: its arguments, its rows, its run on shards, its output."""
