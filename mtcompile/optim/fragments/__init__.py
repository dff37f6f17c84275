"""Updates of parameters whose gradients arrive in fragments."""
