"""The import law: what each room may import, as docs/architecture.md draws it, and what an import may cost."""

from __future__ import annotations

from pathlib import Path

import burst_attention

ROOT = Path(burst_attention.__file__).parent
PACKAGE = ROOT.name
# What a room may import besides itself, Python's own library, torch and numpy. What is not named is forbidden, so a new
# room can import nothing, and be imported by nobody, until it stands here.
MAY_IMPORT = {
    "plan": set(),
    "comm": set(),
    "kernels": {"plan.tile"},
    "attention": {"plan", "comm", "kernels"},
    "loss": {"attention"},
    "integrations": {"attention", "loss"},
    "launch": set(),
    "engines": {"attention", "plan", "loss", "integrations"},
    "testing": {"attention", "plan", "kernels", "comm"},
    "training": {"", "attention", "loss", "engines", "integrations", "launch"},
    "cli": {"", "plan", "kernels", "attention", "testing", "engines", "training", "launch"},
    "": {"attention", "comm", "plan"},  # the package's face
}
THIRD_PARTIES = {  # importable beside torch and numpy; a star: only inside functions, when it is needed
    "kernels": {"*triton", "*flash_attn", "*flash_attn_interface"},
    "kernels/triton": {"triton"},
    "integrations": {"transformers"},
    "training": {"transformers", "*tokenizers", "*datasets", "*matplotlib", "*safetensors"},
    "launch": {"rich"},
    "cli": {"rich", "tyro"},
}
