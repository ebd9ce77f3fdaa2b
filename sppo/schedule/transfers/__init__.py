"""Messages and copies: where a program has them between its compute."""
