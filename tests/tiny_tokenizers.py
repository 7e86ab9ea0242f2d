"""Small tokenizers of each kind of vocabulary, built on the spot and saved as model folders."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from worker import text

CORPUS = [
    "the cat sat on the mat. the dog sat too.",
    "hello world, hello moon. DEFGHIJ",
    "you are a helpful assistant and you answer questions",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>{% endif %}{% endif %}"
)
KINDS = ("byte_level", "sentencepiece_bpe", "sentencepiece_unigram", "wordpiece", "word_end_bpe")


@cache
def folder_of(kind: str) -> Path:
    folder = Path(mkdtemp(prefix=f"tiny-{kind}-"))
    backend, bos, eos = _BUILDERS[kind]()
    wrapper = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    wrapper.chat_template = CHAT_TEMPLATE
    wrapper.save_pretrained(str(folder))
    return folder


@cache
def tokenizer_of(kind: str) -> text.Tokenizer:
    return text.Tokenizer(folder_of(kind))


def _byte_level() -> tuple[Tokenizer, str, str]:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), "<|tool|>", "<table>"])
    return backend, "<s>", "</s>"


def _byte_level_sequence() -> tuple[Tokenizer, str, str]:
    """A byte-level vocabulary behind a decoder of several steps, which is taken as a whole."""
    backend, bos, eos = _byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend, bos, eos


def _sentencepiece_bpe() -> tuple[Tokenizer, str, str]:
    """As Llama 2: a space is put before the text, unknown characters become byte tokens."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = trained.normalizer
    backend.decoder = _sentencepiece_decoder()
    return _with_bos(backend)


def _sentencepiece_unigram() -> tuple[Tokenizer, str, str]:
    letters = [(char, -5.0) for char in "▁abcdefghijklmnopqrstuvwxyz.,"]
    words = [("▁the", -2.0), ("▁cat", -2.5), ("▁hello", -2.5), ("ing", -3.0)]
    bytes_ = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *bytes_, *letters, *words]
    backend = Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_bos(backend)


def _wordpiece() -> tuple[Tokenizer, str, str]:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend, "[CLS]", "[SEP]"


def _word_end_bpe() -> tuple[Tokenizer, str, str]:
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend, "<s>", "</s>"


def _sentencepiece_decoder() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def _with_bos(backend: Tokenizer) -> tuple[Tokenizer, str, str]:
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend, "<s>", "</s>"


_BUILDERS = {
    "byte_level": _byte_level,
    "byte_level_sequence": _byte_level_sequence,
    "sentencepiece_bpe": _sentencepiece_bpe,
    "sentencepiece_unigram": _sentencepiece_unigram,
    "wordpiece": _wordpiece,
    "word_end_bpe": _word_end_bpe,
}
