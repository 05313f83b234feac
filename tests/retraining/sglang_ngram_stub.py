"""SGLang's routes for external corpora over real HTTP, with failures at each of them.

Bodies, statuses, messages and the order of checks are those of SGLang 0.5.23: sglang/srt/entrypoints/
http_server.py, managers/tokenizer_control_mixin.py, speculative/external_corpus_manager.py,
speculative/cpp_ngram/ngram_corpus.py and ngram.cpp beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from driftguard_engine.options import BUNDLED
from transformers import AutoTokenizer

from tests.retraining.sglang_stub import Refused, SglangStub

TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED / "target")


@dataclass
class NgramStub(SglangStub):
    """`late`: a corpus that is added is there only after so many looks at the list."""

    corpora: dict[str, list[list[int]]] = field(default_factory=dict)
    most_tokens: int = 10_000_000
    late: int = 0
    loading: tuple[str, list[list[int]]] | None = None

    def start(self) -> None:
        self.corpora, self.loading, self.version = {}, None, "default"
        self.starts += 1

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/add_external_corpus":
            return self._add(body["corpus_id"], body["documents"])
        if path == "/remove_external_corpus":
            self.corpora.pop(body["corpus_id"], None)
            return {"success": True, "message": f"Removed corpus '{body['corpus_id']}'."}
        if path == "/list_external_corpora":
            self._go_on_loading()
            counts = {name: self._tokens(documents) for name, documents in self.corpora.items()}
            return {"success": True, "corpus_token_counts": counts, "message": ""}
        return super().answer(path, body)

    def _server_info(self) -> dict[str, Any]:
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_external_sam_budget": 4,
            "speculative_ngram_external_corpus_max_tokens": self.most_tokens,
            "version": "0.5.23",
            **self.info,
        }

    def _add(self, name: str, texts: list[str]) -> dict[str, Any]:
        documents: list[list[int]] = []
        truncated = False
        for text in texts:
            ids = TOKENIZER.encode(text, add_special_tokens=False)
            if not ids:
                continue
            if self._tokens([*documents, ids]) > self.most_tokens:
                truncated = True
                break
            documents.append(ids)
        if self.loading is not None:
            raise Refused("Another corpus load is already in progress.")
        if name in self.corpora:
            raise Refused(
                f"External corpus '{name}' already exists. Remove it before adding a new corpus with"
            )
        if not documents:
            raise Refused("External corpus is empty \N{EM DASH} no tokens were loaded.")
        self.loading = name, documents
        self._go_on_loading()
        message = f"Loaded corpus '{name}' with {self._tokens(documents)} tokens."
        if truncated:
            message += f" (truncated: exceeded {self.most_tokens} token limit)"
        return {"success": True, "corpus_id": name, "message": message, "loaded_token_count": 1}

    def _go_on_loading(self) -> None:
        if self.loading is not None and self.late <= 0:
            name, documents = self.loading
            self.corpora[name], self.loading = documents, None
        self.late -= 1

    @staticmethod
    def _tokens(documents: list[list[int]]) -> int:
        return sum(map(len, documents)) + max(len(documents) - 1, 0)
