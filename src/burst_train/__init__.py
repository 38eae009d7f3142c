"""Train, evaluate and export language models on long documents with burst-attention; predict what a run costs."""
