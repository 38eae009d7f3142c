"""Programs that check or write something; each runs by itself."""
