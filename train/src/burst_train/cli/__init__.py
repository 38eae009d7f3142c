"""The subcommands that burst-train adds to ``burst``: train, eval, export and plan."""
