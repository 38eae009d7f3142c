"""One claim each, measured by a command of its own: speed, memory, error, kernels on a GPU."""
