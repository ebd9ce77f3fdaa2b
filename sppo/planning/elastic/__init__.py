"""Plans of steps whose samples differ in length: packed into sequences, cut, scheduled."""
