"""Training steps on a fake GPU: the real engine on torch's fake tensors."""
