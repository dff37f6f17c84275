"""Parts of the cache on disk that need no torch: its files, and the answers of commands."""
