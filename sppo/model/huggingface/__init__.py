"""Weights in the Hugging Face layout: names, reading, writing, and adapters of PEFT."""
