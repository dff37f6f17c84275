"""Local search by moves that equal parts of a step share, up to limits on the device and on the host."""
