#!/usr/bin/env bash
# Packed documents of ringmaster's ranks. With load_balance "distflash" or "head_tail" every row of a batch gets the
# borders of the first row. The README's loop does not read borders from position_ids: the documents see each other.
cat "$(dirname "$0")/ringmaster.py" - <<'PY' | "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 axolotl-ringmaster==0.2.7 numpy==2.4.6
def cases():
    rows = [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (20, 40)]
    positions, ids = torch.stack(rows), torch.cat([tokens(), tokens().flip(1)])
    labels = ids.masked_fill(positions == 0, -100)
    labels[:, 1] = -100  # an even number of targets
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    for balance in ("none", "distflash", "head_tail"):
        yield f"two rows, {balance}", {"batch": batch, "backend": "ring", "balance": balance}, balance == "none"
    one = {name: x[:1] for name, x in batch.items()}
    yield "one row, the loop of the README", {"batch": one, "way": region}, False


if __name__ == "__main__":
    main(cases)
PY
