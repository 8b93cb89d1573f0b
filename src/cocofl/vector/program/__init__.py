"""The instructions of a chain for many devices, and what they compute with."""
