"""The disk tier: a file without a name per model, memory mappings of its parts, and requests past the page cache."""
