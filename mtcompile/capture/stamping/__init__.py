"""Equal blocks are traced once: a few of them are traced, the others are copies of those (stamped)."""
