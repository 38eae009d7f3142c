"""Which causal models of transformers keep packed documents apart: in one process by themselves, and over two ranks?

    python tests/tools/packed_families.py [MODEL_TYPE ...]

Two documents share a row, and ``position_ids`` restart at 0. A model keeps them apart if the logits of the second
document don't change with the tokens of the first. It prints the table of docs/how-to/packed-documents.md.
"""

import argparse
import copy
import inspect
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from burst_attention.integrations import hf
from burst_attention.testing import WorkerError, local_world
from tests.tools.families import LARGEST, VOCABULARY, built, first_line, model_of, taken_by

FIRST, SECOND = 11, 13  # tokens of the documents
APART, ONLY_UNCACHED, TOGETHER = "apart", "apart with use_cache=False", "see each other"


def judge(model_type: str) -> tuple[str, str]:
    """Return which documents see each other in one process, or why that is not known; the same over two ranks."""
    try:
        config, parts = built(model_type)
        if sum(parameter.numel() for parameter in parts.parameters()) > LARGEST:
            return "not run: large", ""
        model = model_of(model_type, config, None)
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return "not run: takes no position_ids", ""
        cached, uncached = keeps_apart(model), keeps_apart(model, **taken_by(model, {"use_cache": False}))
    except Exception as error:
        return f"not run: {first_line(error)}", ""
    alone = APART if cached and uncached else ONLY_UNCACHED if uncached else TOGETHER
    try:
        models = [model_of(model_type, config, "eager")]
        models.append(copy.deepcopy(models[0]))
        with local_world(2) as ranks:
            found = ranks.run(lambda group: over_ranks(models[group.rank()], group))
    except WorkerError:
        return alone, "refused, or an error"
    return alone, APART if all(found) else TOGETHER


def over_ranks(model: Any, group: Any) -> bool:
    """Return whether a model keeps documents apart over ranks."""
    return keeps_apart(hf.parallelize(model, group, strategy="ring", timeout=60), logits="gather")


@torch.no_grad()
def keeps_apart(model: Any, **options: Any) -> bool:
    """Return whether the second document's logits ignore the first one."""
    ids = torch.randint(3, VOCABULARY, (1, FIRST + SECOND), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, :FIRST] = 3 + (other[:, :FIRST] - 2) % (VOCABULARY - 3)
    given = {"position_ids": torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None], **options}
    one, two = (model(input_ids=x, **given).logits[:, FIRST:] for x in (ids, other))
    return bool((one - two).abs().max() <= 1e-9 * one.abs().max())


def main() -> None:
    """Judge the given types, or all of them, and print a row for each verdict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found: dict[tuple[str, str], list[str]] = {}
    for model_type in parser.parse_args().types:
        verdict = judge(model_type)
        print(model_type, *verdict, file=sys.stderr)
        found.setdefault(verdict, []).append(model_type)
    print(f"transformers {transformers.__version__}, {sum(map(len, found.values()))} model types")
    for (alone, ours), types in sorted(found.items(), key=lambda row: (row[0][0].startswith("not run"), row[0])):
        print(f"{alone}{'; over ranks: ' if ours else ''}{ours} ({len(types)}): {', '.join(types)}")


if __name__ == "__main__":
    main()
