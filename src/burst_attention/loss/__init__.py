"""Losses over shards: exact, chunked, and shared out so that gradients sum to the one-device gradient."""

from .next_token import Head, LogitForm, next_token_loss, next_token_nll

__all__ = ["Head", "LogitForm", "next_token_loss", "next_token_nll"]
