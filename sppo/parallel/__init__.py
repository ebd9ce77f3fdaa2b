"""Process groups and the communication between ranks."""
