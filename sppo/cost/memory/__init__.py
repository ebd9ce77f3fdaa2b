"""Memory of each pipeline rank by bucket: state, K and V, saved, running and copied tensors."""
