"""Commands that each measure one claim: speed, memory, error, agreement, or kernels on a GPU."""
