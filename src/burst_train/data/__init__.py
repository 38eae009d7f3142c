"""Documents, tokens and packed sequences, read in an order that a resumed run continues."""
