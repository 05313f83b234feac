"""A Llama model of transformers -> GGUF: `python -m tests.live.to_gguf MODEL --outfile OUT`.

By llama.cpp's own converter, which knows the pre-tokenizers of published models by their hashes: that of the
bundled pair is GPT-2's, and this says so.
"""

from __future__ import annotations

import importlib
import sys

from tests.live.install import LLAMA


def main() -> None:
    sys.path[:0] = [str(LLAMA), str(LLAMA / "gguf-py")]
    text_model = importlib.import_module("conversion.base").TextModel
    text_model.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    importlib.import_module("conversion.llama").LlamaModel.set_vocab = text_model._set_vocab_gpt2
    sys.argv += ["--outtype", "f32"]
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main()
