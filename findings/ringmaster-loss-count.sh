#!/usr/bin/env bash
# The loss of ringmaster's ranks is no mean over the targets of the sequence. Its manager for trainers rounds the targets
# per rank to a whole number: three over two ranks give 3/4 of loss and gradients, and one gives NaN. In the README's
# loop each rank divides by its own targets, and the ranks' gradients are averaged as equals.
cat "$(dirname "$0")/ringmaster.py" - <<'PY' | "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 axolotl-ringmaster==0.2.7 numpy==2.4.6
def cases():
    ids = tokens()
    for count in (1, 3, 4):  # 4: two for each rank
        yield f"num_items_in_batch={count}", {"batch": {"input_ids": ids, "labels": labels_of(ids, count)}}, count == 4
    batch = {"input_ids": ids, "labels": labels_of(ids, 44)}
    yield "the loop of the README, a prompt of 20 tokens", {"batch": batch, "way": region}, False


if __name__ == "__main__":
    main(cases)
PY
