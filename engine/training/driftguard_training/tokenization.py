"""The byte-level BPE tokenizer that the bundled target and draft share."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    texts: list[str],
    vocabulary: int,
    context_tokens: int,
    *,
    end: str = END_OF_TEXT,
    first: pre_tokenizers.PreTokenizer | None = None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string is representable, so there is no unknown token. first: what splits text
    before its bytes do."""
    tokenizer, by_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = by_bytes if first is None else pre_tokenizers.Sequence([first, by_bytes])
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=end, model_max_length=context_tokens
    )
