"""Add the subcommands train, eval, export and plan to ``burst``."""
