"""Several ranks that train one model together, on torch.distributed alone."""
