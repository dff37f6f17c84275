"""What is kept of a parameter and how it is updated: precisions, fp32 masters, updates in the backward."""
