"""A tiktoken vocabulary as a `tokenizers` backend: what tokenizers that are only Python code mostly have inside (Kimi).

tiktoken joins, of all neighbours in a word, those whose joint bytes have the lowest rank. `tokenizers` wants to be told
which pairs may be joined: for each token all the ways to cut it into two others, in the order of the ranks (as the
converter of `transformers` has it).
"""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.text.codec import byte_level_alphabet

SAMPLES = (
    "Hello, world! I'll say it's 1234567 times, e.g. in camelCase or SNAKE_CASE.",
    "  Ein Größenvergleich:\n\n\tnaïve façade\r\n  \n end  ",
    "北京的天气怎么样？東京タワー 서울 Привет мир, مرحبا 🏔️👩‍👩‍👧",
    "def f(x: int) -> str:\n    return f'{x!r}' + \"\\\\n\" * 3  # <|im_end|> [x]\n",
)
"""Texts on which the backend must agree with tiktoken itself."""


def tiktoken_backend(
    ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int], origin: str
) -> tokenizers.Tokenizer:
    """Build the backend.

    Args:
        ranks: bytes of each token -> its id, which is its rank.
        pattern: the regular expression that cuts text into words.
        special_tokens: spelling -> id; the ids follow those of `ranks`.
        origin: for errors.

    Raises:
        CheckpointError: ids with a gap, or a pattern that cannot be used.
    """
    alphabet = byte_level_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    pairs = [(spelled(left), spelled(right)) for _, _, _, left, right in sorted(merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    try:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{origin}: the pattern of its tokenizer cannot be used: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for spelling, token_id in sorted(special_tokens.items(), key=lambda item: item[1]):
        backend.add_special_tokens([AddedToken(spelling, normalized=False, special=True)])
        if backend.token_to_id(spelling) != token_id:
            raise CheckpointError(
                f"{origin}: the special token {spelling!r} has the id {token_id}, behind a gap; none may be left out"
            )
    return backend
