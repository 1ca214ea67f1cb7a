"""A tokenizer for synthetic checkpoints: bytes in, made-up words out, every id of the vocabulary decodes."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stepkernel.model.config import ModelConfig

_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def special_tokens(config: ModelConfig) -> dict[int, str]:
    """Names of the special ids: [BOS], [EOS], [PAD], further end tokens as [EOS2] and so on."""
    names = {config.pad_token_id: "[PAD]"}
    for number, token in enumerate(config.eos_token_ids, start=1):
        names[token] = "[EOS]" if number == 1 else f"[EOS{number}]"
    names[config.bos_token_id] = "[BOS]"
    return names


def synthetic_tokenizer(config: ModelConfig) -> Tokenizer:
    """Byte-level BPE without merges: text becomes bytes; ids beyond the bytes are words for decoding only."""
    special = special_tokens(config)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary: dict[str, int] = {}
    for token in range(config.vocab_size):
        plain = len(vocabulary) - sum(1 for other in special if other < token)
        text = alphabet[plain] if plain < len(alphabet) else _word(plain - len(alphabet))
        vocabulary[special.get(token, text)] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for _, name in sorted(special.items())]
    )
    return tokenizer


def _word(number: int) -> str:
    """A distinct word of at least two letters, with the leading space mark of byte-level vocabularies."""
    letters = _LETTERS[number % 26]
    number //= 26
    while True:
        letters += _LETTERS[number % 26]
        number //= 26
        if number == 0:
            return "Ġ" + letters
        number -= 1
