"""Exact, chunked losses over shards.

Each rank's backward gives its share of the gradient. Summed over ranks, the shares are the one-device gradient.
"""

from .head import Head, LogitForm
from .log_probs import TokenLogProbs, token_log_probs
from .next_token import next_token_loss, next_token_nll

__all__ = ["Head", "LogitForm", "TokenLogProbs", "next_token_loss", "next_token_nll", "token_log_probs"]
