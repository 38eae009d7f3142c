"""Which token lives where, which pairs are seen, who computes them and what moves: integers only."""
