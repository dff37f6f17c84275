"""The memory of one model: arenas that its programs share, and the homes of its parameters."""
