"""Parameters and their updates: precisions, sizes of optimizer state, fp32 masters, updates in the backward."""
