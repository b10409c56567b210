"""How the Hessian of one layer is measured: what is exact, what is estimated, and how each is checked."""
