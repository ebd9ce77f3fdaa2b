"""Planning of steps whose samples differ in length: packing, cutting and scheduling."""
