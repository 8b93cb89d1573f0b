"""A model as a chain of blocks: ``split`` cuts one out of an ordinary ``nn.Module``."""

from cocofl.chain.blocks import BlockChain, GraphBlock, Wiring
from cocofl.chain.splitting import graph_block, split
from cocofl.chain.trace import in_mode

__all__ = ["BlockChain", "GraphBlock", "Wiring", "graph_block", "in_mode", "split"]
