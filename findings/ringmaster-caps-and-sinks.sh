#!/usr/bin/env bash
# The ring attention of ringmaster drops the soft cap of Gemma 2's scores and gpt-oss's sinks, which transformers passes
# as keywords. No error is raised, and the sinks get no gradient.
cat "$(dirname "$0")/ringmaster.py" - <<'PY' | "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 axolotl-ringmaster==0.2.7 numpy==2.4.6
def cases():
    ids, full = tokens(), {"layer_types": ["full_attention"] * 2}
    labels = ids.clone()
    labels[:, 1] = -100  # an even number of targets
    batch = {"input_ids": ids, "labels": labels}
    capped = full | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
    sinks = full | {"num_local_experts": 2, "num_experts_per_tok": 1}
    for kind, own, right in (("llama", {}, True), ("gemma2", capped, False), ("gpt_oss", sinks, False)):
        yield kind, {"batch": batch, "kind": kind, "own": own, "backend": "ring"}, right


if __name__ == "__main__":
    main(cases)
PY
