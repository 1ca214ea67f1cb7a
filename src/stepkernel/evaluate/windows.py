"""Real text as equal windows of tokens, for teacher-forced runs."""

from pathlib import Path

from stepkernel.model.config import ModelConfig
from stepkernel.runtime.text import TextCodec


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


def token_windows(
    config: ModelConfig, codec: TextCodec, text: str, count: int, length: int, source: str
) -> list[list[int]]:
    """`count` windows of a begin token and `length` tokens, evenly spread over the text and not overlapping.

    Raises ValueError if the text is too short or the model takes no such context.
    """
    if length + 1 > config.max_positions:
        raise ValueError(f"windows of {length + 1} tokens: the model takes {config.max_positions}; lower --tokens")
    ids = codec.encode(text)
    if len(ids) < count * length:
        raise ValueError(
            f"{source}: {len(ids)} tokens, {count} windows of {length} are wanted; lower --tokens or give a longer text"
        )
    largest = max(ids)
    if largest >= config.vocab_size:
        raise ValueError(f"{source}: token {largest}, the model has {config.vocab_size}; this is another tokenizer")
    stride = len(ids) // count
    return [[config.bos_token_id, *ids[i * stride : i * stride + length]] for i in range(count)]
