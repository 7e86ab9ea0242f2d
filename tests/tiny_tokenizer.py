"""A byte-level tokenizer for the tiny models: one token a byte, a few special ones, a small chat template."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import VOCAB_SIZE

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHAT_TEMPLATE = "{% for m in messages %}<bos>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}<bos>assistant:"


def save_tiny_tokenizer(folder: Path) -> Path:
    """Every id below `VOCAB_SIZE` has a token: the special ones, then the bytes, then some of three letters."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"x{number:02x}" for number in range(VOCAB_SIZE - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    wrapper = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    wrapper.save_pretrained(folder)
    return folder
