"""The KV budget as reference-counted blocks, and which block holds the KV of which tokens under which adapter."""

from collections import OrderedDict
from collections.abc import Sequence

from app.engine.embedded.options import BLOCK_SIZE

Content = tuple[int, tuple[int, ...]]
"""(id of what precedes, the block's tokens): equal contents mean equal KV. The chain starts at an adapter's root."""


class BlockPool:
    """Hands out `num_blocks` blocks and never more. A block nobody holds keeps its content until it is needed again.

    Block ids run from 1 to num_blocks; block 0 belongs to nobody and pads short rows.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._holders = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        """Blocks without a holder, the longest unused first."""
        self._block_of: dict[Content, int] = {}
        self._content_of: dict[int, Content] = {}
        self._content_id: dict[int, int] = {}
        self._next_content_id = 1

    @property
    def free(self) -> int:
        return len(self._free)

    def match(self, root: int, token_ids: Sequence[int]) -> list[int]:
        """The blocks that already hold the longest prefix of whole blocks. They are not held yet: see `hold`."""
        parent, found = root, []
        for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = self._block_of.get((parent, tuple(token_ids[start : start + BLOCK_SIZE])))
            if block is None:
                break
            found.append(block)
            parent = self._content_id[block]
        return found

    def unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` holding would take out of the free ones."""
        return sum(1 for block in blocks if self._holders[block] == 0)

    def hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def take(self) -> int:
        """A block to write into, held once; its former content is forgotten. The caller has checked `free`."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._holders[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one hold on each. A sequence's later blocks are reused first: prefixes serve more requests."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def content_id(self, block: int) -> int:
        """The id of a matched block's content, the parent of what follows it."""
        return self._content_id[block]

    def name(self, block: int, parent: int, token_ids: Sequence[int]) -> int:
        """Records what a full block holds, so that others can share it; returns the content's id.

        If another block holds the same already, that one stays the shared one.
        """
        content = (parent, tuple(token_ids))
        known = self._block_of.get(content)
        if known is not None:
            return self._content_id[known]
        self._block_of[content] = block
        self._content_of[block] = content
        self._content_id[block] = self._next_content_id
        self._next_content_id += 1
        return self._content_id[block]

    def forget(self) -> None:
        """No block's content is known any more. The caller has released all holds."""
        self._block_of.clear()
        self._content_of.clear()
        self._content_id.clear()

    def _forget(self, block: int) -> None:
        content = self._content_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
            del self._content_id[block]
