"""Text to token ids and back: byte-level BPE from GGUF metadata or tokenizer.json, and the ChatML turn format."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .config import ModelError, one_line
from .hf_folder import read_json

if TYPE_CHECKING:
    from .gguf_file import GgufModel

# GGUF token types (llama.cpp's vocabulary attributes) that are matched in the text before BPE.
CONTROL, USER_DEFINED = 3, 4
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with the model's turn format.

    Attributes
    ----------
        tokenizer: text to ids; special tokens written in the text are recognised.
        stop_tokens: ids that end a generated text.
        template: the model's chat template (Jinja source), empty if it has none.
        bos_token: id put before a plain text that has no turns, or None.
    """

    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    template: str = ""
    bos_token: int | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def is_chat(self) -> bool:
        """Whether the model's turns are written in ChatML."""
        return TURN_START in self.template and TURN_END in self.template

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, after `bos_token` if the model wants one."""
        ids = self.encode_special(text)
        return ids if self.bos_token is None else [self.bos_token, *ids]

    def encode_special(self, text: str) -> list[int]:
        """Ids of a text in which the special tokens are written out."""
        # `encode` would hold the interpreter's lock, for seconds if the text is long.
        return self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids

    def encode_turn(self, prompt: str) -> list[int]:
        """Ids of a conversation in which the user says `prompt` and the assistant is about to answer."""
        system = default_system_message(self.template)
        turns = f"{TURN_START}system\n{system}{TURN_END}\n" if system is not None else ""
        turns += f"{TURN_START}user\n{prompt}{TURN_END}\n{TURN_START}assistant\n"
        return self.encode_special(turns)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def default_system_message(template: str) -> str | None:
    """The system message that a ChatML template inserts when the conversation has none; None if it inserts nothing."""
    at, end = 0, 0
    while (opening := _SYSTEM_TURN.search(template, at)) is not None:
        begin = opening.end()
        if end <= begin and (end := template.find(TURN_END, begin + 1)) < 0:
            return None
        if (code := _CODE.search(template, begin, end)) is None:
            return template[begin:end]
        # A turn that starts before the code ends after it: the search continues after the code.
        at = code.end()
    return None


# In the template's string literals a line break is either itself or the two characters \n.
_SYSTEM_TURN = re.compile(re.escape(TURN_START) + r"system(?:\n|\\n)")
# The end of a string literal, or Jinja syntax.
_CODE = re.compile(r"['\"{}]")


def tokenizer_from_gguf(model: "GgufModel") -> ChatTokenizer:
    """Assemble the tokenizer that the metadata of a GGUF file describes.

    Raises `NotImplementedError` for another model than byte-level BPE or an unknown pre-tokenizer, and `ModelError`
    for vocabulary, merges and special tokens that do not fit together.
    """
    kind = model.metadata("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise NotImplementedError(
            f"{model.path}: tokenizer.ggml.model is {kind!r}, supported is 'gpt2' (byte-level BPE); "
            "a Hugging Face folder with tokenizer.json works for every kind"
        )
    tokens = model.metadata("tokenizer.ggml.tokens", list)
    types = model.metadata("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in model.metadata("tokenizer.ggml.merges", list)]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelError(
            f"{model.path}: tokenizer.ggml.tokens has {len(tokens)} entries, {len(set(tokens))} different ones, and "
            f"tokenizer.ggml.token_type {len(types)}, expected one type for each and no token twice"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # the package raises bare Exception
        raise ModelError(
            f"{model.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {one_line(error)}"
        ) from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    for special in (True, False):
        added_type = CONTROL if special else USER_DEFINED
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == added_type
        ]
        tokenizer.add_tokens(added)
    bos = model.metadata("tokenizer.ggml.bos_token_id", int, -1)
    stops = {model.metadata(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")}
    return checked(
        ChatTokenizer(
            tokenizer,
            stop_tokens=frozenset(stops - {-1}),
            template=model.metadata("tokenizer.chat_template", str, ""),
            bos_token=bos if bos >= 0 and model.metadata("tokenizer.ggml.add_bos_token", bool, False) else None,
        ),
        model.path,
        model.config.vocab_size,
    )


def pre_tokenizer(model: "GgufModel") -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer, by llama.cpp's name."""
    name = model.metadata("tokenizer.ggml.pre", str, "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise NotImplementedError(f"{model.path}: tokenizer.ggml.pre is {name!r}, supported are 'gpt-2' and 'smollm'")


def tokenizer_from_folder(folder: Path, vocab_size: int) -> ChatTokenizer:
    """Read tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: is missing, expected the tokenizer of the model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"{path}: cannot be read by tokenizers {tokenizers.__version__}: {one_line(error)}") from error
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    template = settings.get("chat_template") or ""
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    # The post-processor of tokenizer.json adds the BOS token of plain text.
    leading = tokenizer.encode("", add_special_tokens=True).ids
    return checked(
        ChatTokenizer(
            tokenizer,
            stop_tokens=stop_tokens_of_folder(folder),
            template=template if isinstance(template, str) else json.dumps(template),
            bos_token=leading[0] if leading else None,
        ),
        folder,
        vocab_size,
    )


def stop_tokens_of_folder(folder: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, or else of config.json: one id or a list."""
    for name in ("generation_config.json", "config.json"):
        stops = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        if stops is not None:
            ids = stops if isinstance(stops, list) else [stops]
            if not all(isinstance(token, int) for token in ids):
                raise ModelError(f"{folder / name}: eos_token_id is {stops!r}, expected a token id or a list of them")
            return frozenset(ids)
    return frozenset()


def checked(tokenizer: ChatTokenizer, path: Path, vocab_size: int) -> ChatTokenizer:
    """`tokenizer`, if all its ids are rows of the model's embedding; otherwise `ModelError`."""
    highest = max([tokenizer.vocab_size - 1, tokenizer.bos_token or 0, *tokenizer.stop_tokens])
    if highest >= vocab_size:
        raise ModelError(f"{path}: the tokenizer has token id {highest}, the embedding has {vocab_size} rows")
    return tokenizer
