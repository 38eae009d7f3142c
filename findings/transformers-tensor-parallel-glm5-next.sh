#!/usr/bin/env bash
# Tensor parallelism of transformers (tp_plan="auto") and GLM-5.3 (glm5_next): the plan cuts `self_attn.o_proj` of every
# layer by rows. In its attention layers the heads before it are cut too, but in its linear attention layers they are
# not. So a model with the latter, three layers in four by default, raises an error in its first forward.
exec "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 <<'EOF'
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModel, Glm5NextTextConfig, Glm5NextTextModel
from transformers.utils import logging

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "v_head_dim": 8}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "pad_token_id": 0}
sizes |= {"qk_nope_head_dim": 8, "index_topk": 8, "index_kpool": 4, "index_head_dim": 8, "index_n_heads": 4}
sizes |= {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense"] * 2}
EXPECTED = {"indexed_attention": "equal", "linear_attention": "RuntimeError"}


def forward(folder, **how):
    model = AutoModel.from_pretrained(folder, **how).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 25)[None], use_cache=False).last_hidden_state


def rank(number, folders, store):
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=number, world_size=2)
    mesh, seen = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {}
    for kind, folder in folders.items():
        try:
            out = forward(folder, tp_plan="auto", device_mesh=mesh)
            seen[kind] = "equal" if torch.allclose(out, forward(folder), atol=1e-4) else "another result"
        except RuntimeError as error:
            seen[kind] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if number == 0:
            print(f"seen: layers of {kind}: {seen[kind]}", flush=True)
    dist.destroy_process_group()
    if {kind: what.split(":")[0] for kind, what in seen.items()} != EXPECTED:
        sys.exit("changed")


if __name__ == "__main__":
    logging.disable_progress_bar()
    print("expected: two ranks compute what one process does, for layers of both kinds")
    with tempfile.TemporaryDirectory() as store:
        folders = {kind: f"{store}/{kind}" for kind in EXPECTED}
        for kind, folder in folders.items():
            torch.manual_seed(0)
            Glm5NextTextModel(Glm5NextTextConfig(**sizes, layer_types=[kind] * 2)).save_pretrained(folder)
        mp.spawn(rank, (folders, store), nprocs=2)
EOF
