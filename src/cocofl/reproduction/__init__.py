"""The paper's tables and figures: which runs they need, and what came out beside its numbers."""
