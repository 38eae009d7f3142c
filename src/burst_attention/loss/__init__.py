"""Losses over shards: exact, chunked, and shared out so that gradients sum to the one-device gradient."""

from .head import Head, LogitForm
from .log_probs import TokenLogProbs, token_log_probs
from .next_token import next_token_loss, next_token_nll

__all__ = ["Head", "LogitForm", "TokenLogProbs", "next_token_loss", "next_token_nll", "token_log_probs"]
