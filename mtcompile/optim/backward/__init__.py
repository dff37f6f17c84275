"""Updates in the backward: the optimizer's arithmetic as gradients arrive, on whole weights and on fragments."""
