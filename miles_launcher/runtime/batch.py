"""What the trainer scores and trains on: token ids, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences as token ids, each a prompt followed by its response.

    tokens: per sequence, prompt and response together; prompt_lengths, response_lengths: tokens of
    each part. A response may be one token, or empty. Raises `ValueError` naming the sequence whose
    numbers do not add up.
    """

    tokens: list[list[int]]
    prompt_lengths: list[int]
    response_lengths: list[int]

    def __post_init__(self) -> None:
        counts = (len(self.tokens), len(self.prompt_lengths), len(self.response_lengths))
        if len(set(counts)) != 1 or not self.tokens:
            raise ValueError(
                f"batch: {counts[0]} sequences, {counts[1]} prompt lengths, {counts[2]} response "
                "lengths; all three must be equal and at least one"
            )
        for number, (tokens, prompt, response) in enumerate(
            zip(self.tokens, self.prompt_lengths, self.response_lengths, strict=True)
        ):
            if prompt < 1 or response < 0 or prompt + response != len(tokens):
                raise ValueError(
                    f"batch: sequence {number} has {len(tokens)} tokens, not {prompt} of prompt "
                    f"(at least 1) and {response} of response"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    def spans(self, sequences: int, tokens: int = 0) -> list[tuple[int, int]]:
        """Consecutive sequences that share a micro-batch, as half-open ranges: at most `sequences`
        and `tokens` (0: any number), at least one sequence."""
        found: list[tuple[int, int]] = []
        start = held = 0
        for number, sequence in enumerate(self.tokens):
            count = number - start
            full = count == sequences or (tokens > 0 and held + len(sequence) > tokens)
            if count and full:
                found.append((start, number))
                start, held = number, 0
            held += len(sequence)
        return [*found, (start, len(self))]

    def part(self, which: slice) -> Batch:
        """The batch of some of its sequences."""
        return Batch(
            tokens=self.tokens[which],
            prompt_lengths=self.prompt_lengths[which],
            response_lengths=self.response_lengths[which],
        )

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of all sequences: the divisor of the loss."""
        return sum(self.response_lengths)
