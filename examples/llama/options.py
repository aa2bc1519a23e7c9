"""What a request says about choosing tokens; imports no JAX, for processes without a device."""

from dataclasses import dataclass

# The largest number of alternatives whose log-probabilities can be asked for.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are chosen; the default is the most likely one.

    Attributes
    ----------
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the `top_k` most likely tokens (and those as likely as the last of them); 0 takes all.
        top_p: only the most likely tokens that together reach this probability, of what `top_k` left.
        min_p: only tokens at least this likely, as a share of the most likely one.
        presence_penalty: subtracted from the logit of a token that was generated before.
        frequency_penalty: subtracted as often as the token was generated before.
        repetition_penalty: divides a positive logit, and multiplies a negative one, of a token in prompt or text.
        seed: 64 bits that decide the random numbers.
        logprobs: whether log-probabilities are wanted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before it, beyond the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def is_argmax(self) -> bool:
        """Whether the most likely token is all that is wanted."""
        return not (self.temperature or self.has_penalties or self.logprobs)
