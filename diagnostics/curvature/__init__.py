"""The Hessian of single layers: exact traces, estimates with their errors, eigenvalues."""
