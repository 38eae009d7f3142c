"""Why some parts and kinds of layers of transformers can't run on shards, for error messages."""

from __future__ import annotations

from collections.abc import Mapping

_ALIBI = "adds biases by distance (ALiBi) to its attention scores, which no kernel here takes"
_CODEBOOKS = "reads several codebooks for each token, not one row of ids"
_COMPRESSED = "its queries see keys that sum up groups of tokens, which cross the shards' borders"
_INKLING = "it convolves keys and values over tokens, and adds biases by distance to its attention scores"
# By the name of the class that defines a part's forward.
OF_PARTS: Mapping[str, str] = {
    "BigBirdBlockSparseAttention": "attends to random blocks of the sequence (set attention_type='original_full')",
    "BloomAttention": _ALIBI,
    "BltCrossAttention": "attends to patches of bytes, whose borders the model finds in the whole sequence",
    "CpmAntModel": "adds biases by position to its attention scores, which no kernel here takes",
    "DogeAttention": "makes its mask from the values of the keys that it gets",
    "FalconAttention": _ALIBI,
    "MptAttention": _ALIBI,
    "MusicgenDecoder": _CODEBOOKS,
    "MusicgenMelodyDecoder": _CODEBOOKS,
    "ProphetNetDecoder": "attends to several streams of predicted tokens (n-grams)",
    "ReformerAttention": "sorts the tokens of the whole sequence into buckets (LSH attention)",
    "RwkvSelfAttention": "is a recurrence with a shift of tokens (RWKV) whose state is not passed between ranks",
    "XLMModel": "makes its mask from the padding among the ids that it gets",
    "XLNetRelativeAttention": "adds biases by relative position to its attention scores, which no kernel here takes",
    "ZayaCCAProjection": "convolves queries and keys over neighbouring tokens, which are not passed between ranks",
    "xLSTMBackend": "is a recurrence (mLSTM) whose state is not passed between ranks",
}
# By the name in the configuration's list of layers.
OF_LAYERS: Mapping[str, str] = {
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
    "hybrid_sliding": _INKLING,
    "indexed_attention": "its indexer picks each query's keys by scores over the whole sequence (there is no mask "
    "before the call)",
    "recurrent": "it is a gated linear recurrence (RG-LRU) whose state is not passed between ranks",
}
OTHER_LAYER = "such a layer mixes tokens without the attention"
