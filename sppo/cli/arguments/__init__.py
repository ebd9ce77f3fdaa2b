"""What commands are asked: their arguments and options, read and checked."""
