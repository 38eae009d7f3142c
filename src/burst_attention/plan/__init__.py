"""Which rank holds which tokens, which pairs are seen, who computes them and what circulates. Integers only."""
