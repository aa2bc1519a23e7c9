"""Text from token ids as they arrive: never half a character, and nothing that may still become a stop string."""

from collections.abc import Sequence

from llama.tokenizer import ChatTokenizer

# What the decoder puts where bytes do not yet form a character.
INCOMPLETE = "\ufffd"
# Decoded again with what is new: some decoders treat the first token of a text differently.
CONTEXT_TOKENS = 8
# A character of UTF-8 has at most four bytes, so more pending tokens are not the beginning of one.
MAX_PENDING = 4


class TextStream:
    """The text of one generated sequence.

    Attributes
    ----------
        stopped: whether a stop string was found; the text ends before it.
        num_taken: characters that the tokens so far have given, those of a stop string included.
        num_released: characters that came out.
    """

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []  # what is decoded together: some context, and what is new
        self._decoded = 0  # how many of them have been taken
        self._before = ""  # their text
        self._held = ""
        self.num_taken = 0
        self.num_released = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more token."""
        self._tokens.append(token)
        return self._release(self._take(final=False), final=False)

    def push_all(self, tokens: list[int]) -> str:
        """`push` of each; decoded at once where that gives the same text."""
        if len(tokens) > 1 and not self._stops and INCOMPLETE not in (text := self._decode([*self._tokens, *tokens])):
            self._tokens += tokens
            return self._release(self._accept(text), final=False)
        return "".join([self.push(token) for token in tokens])

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        return self._release(self._take(final=True), final=True)

    def _take(self, *, final: bool) -> str:
        text = self._decode(self._tokens)
        pending = len(self._tokens) - self._decoded
        if text.endswith(INCOMPLETE) and not final and pending < MAX_PENDING:
            return ""
        return self._accept(text)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _accept(self, text: str) -> str:
        """Take all tokens, whose text is `text`; returns what is new of it."""
        new = text[len(self._before) :]
        self.num_taken += len(new)
        if len(self._tokens) >= 2 * CONTEXT_TOKENS:
            del self._tokens[:-CONTEXT_TOKENS]
            text = self._decode(self._tokens)
        self._decoded, self._before = len(self._tokens), text
        return new

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._without_stops(new, final=final)
        self.num_released += len(text)
        return text

    def _without_stops(self, new: str, *, final: bool) -> str:
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0
        if not final:
            for stop in self._stops:
                for length in range(min(len(stop) - 1, len(text)), keep, -1):
                    if text.endswith(stop[:length]):
                        keep = length
                        break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
