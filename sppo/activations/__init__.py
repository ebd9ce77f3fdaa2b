"""What happens to saved activations between forward and backward, as plans decide it."""
