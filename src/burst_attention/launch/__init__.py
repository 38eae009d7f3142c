"""Starting local ranks, joining the ranks of a running job, and the device mesh over them."""
