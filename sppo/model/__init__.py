"""The model as explicit forward and backward passes, its presets and its Hugging Face form."""
