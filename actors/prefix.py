"""Names for the content of KV pages: a full page is known by every token up to its end."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

_TOKEN_BYTES = array("i").itemsize
_HASH_BYTES = 32


class HashChain:
    """The hashes of a request's full pages, as its tokens become known.

    Hash i depends on the salt and on all tokens of pages 0 to i, so equal hashes mean equal
    prefixes, and chains of different salts have none in common. Every token is hashed once,
    however the sequence is cut into calls.
    """

    def __init__(self, page_size: int, salt: str) -> None:
        """`page_size` is in tokens. Any string is a salt, the empty one too."""
        assert page_size >= 1
        self.hashes: list[bytes] = []
        self._page_bytes = page_size * _TOKEN_BYTES
        # `person` keeps the two uses apart: no salt can be made to look like a page.
        self._last = blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES, person=b"salt"
        ).digest()
        self._tail = array("i")  # tokens behind the last full page

    def extend(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the sequence; pages they fill add to `hashes`.

        Raises `OverflowError` for a token id that is not an int32.
        """
        self._tail.extend(token_ids)
        tokens = self._tail.tobytes()
        end = len(tokens) - len(tokens) % self._page_bytes
        for start in range(0, end, self._page_bytes):
            page = tokens[start : start + self._page_bytes]
            self._last = blake2b(
                self._last + page, digest_size=_HASH_BYTES, person=b"page"
            ).digest()
            self.hashes.append(self._last)
        del self._tail[: end // _TOKEN_BYTES]


def page_hashes(token_ids: Iterable[int], page_size: int, salt: str) -> list[bytes]:
    """The hashes of the full pages of one whole sequence, as a `HashChain` gives them."""
    chain = HashChain(page_size, salt)
    chain.extend(token_ids)
    return chain.hashes
