"""One measurement: what runs on the ranks, who judges it, and the rows that come of it."""
